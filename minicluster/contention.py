"""CPU contention: the share of this machine's cores that processes of others take."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

BUSY_COLUMNS = (0, 1, 2, 5, 6, 7)
"""
Columns of a `cpuN` line in /proc/stat that count as busy: user, nice, system, irq, softirq, steal.

Left out are idle, iowait, and guest, which user holds already. Source: proc(5).
"""

STAT_UTIME = 11
"""
Position of utime after the command in /proc/PID/stat; stime, and both of children that have ended
and were waited for, follow. Source: proc(5).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuTimes:
    """
    Processor time spent on this machine up to one moment.

    Attributes:
        at_s: the moment, monotonic.
        busy_s: of the cores that this process may use, steal included, in core seconds.
        ours_s: of that, our processes'.
    """

    at_s: float
    busy_s: float
    ours_s: float
    cores: int


def cpu_times(pids: Iterable[int]) -> CpuTimes:
    """
    Read the clocks of the kernel; *pids* are ours.

    Raises:
        OSError: this system has no /proc.
    """
    tick_s = 1.0 / os.sysconf("SC_CLK_TCK")
    cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    busy = 0
    for line in Path("/proc/stat").read_text(encoding="ascii").splitlines():
        name, _, counts = line.partition(" ")
        if name in cores:
            ticks = [int(count) for count in counts.split()]
            busy += sum(ticks[column] for column in BUSY_COLUMNS)
    return CpuTimes(
        at_s=time.monotonic(),
        busy_s=busy * tick_s,
        ours_s=sum(map(_process_ticks, pids)) * tick_s,
        cores=len(cores),
    )


def others_fraction(start: CpuTimes, end: CpuTimes) -> float:
    """
    Return the share of the cores that other processes took between two moments, 0 to 1.

    Steal, which a hypervisor gave to other machines, counts as theirs.

    Ignores:
        Processes of ours that ended in between without one of ours waiting for them.
    """
    others_s = (end.busy_s - start.busy_s) - (end.ours_s - start.ours_s)
    return min(1.0, max(0.0, others_s / (end.cores * (end.at_s - start.at_s))))


def _process_ticks(pid: int) -> int:
    """Return the processor time of a process; 0 for one that has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    # The command, in parentheses, may itself hold blanks and parentheses.
    fields = stat.rpartition(")")[2].split()
    return sum(map(int, fields[STAT_UTIME : STAT_UTIME + 4]))
