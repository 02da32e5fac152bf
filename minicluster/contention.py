"""CPU contention: the share of this machine's cores that processes of others take."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterable

BUSY = ("user", "nice", "system", "irq", "softirq", "steal")
"""Times of a core that count as busy; `user` holds `guest` already. Source: proc(5)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuTimes:
    """
    Processor time spent on this machine up to one moment of the monotonic clock.

    Attributes:
        busy_s: of the cores that this process may use, steal included, in core seconds.
        ours_s: of that, our processes'.
    """

    at_s: float
    busy_s: float
    ours_s: float
    cores: int


def cpu_times(pids: Iterable[int]) -> CpuTimes:
    """Read the clocks of the kernel; *pids* are ours, and one that has ended has no time."""
    usable = os.sched_getaffinity(0)
    cores = [each for core, each in enumerate(psutil.cpu_times(percpu=True)) if core in usable]
    return CpuTimes(
        at_s=time.monotonic(),
        busy_s=sum(getattr(core, name) for core in cores for name in BUSY),
        ours_s=sum(map(_process_s, pids)),
        cores=len(cores),
    )


def others_fraction(start: CpuTimes, end: CpuTimes) -> float:
    """
    Return the share of the cores that other processes took between two moments, 0 to 1.

    Steal, which a hypervisor gave to other machines, counts as theirs.

    Ignores: Processes of ours that ended in between without one of ours waiting for them.
    """
    others_s = (end.busy_s - start.busy_s) - (end.ours_s - start.ours_s)
    return min(1.0, max(0.0, others_s / (end.cores * (end.at_s - start.at_s))))


@dataclass(slots=True)
class ContentionMeter:
    """
    The share of the cores that other processes took, over many intervals.

    Over one long interval, a process of ours that ended without one of ours waiting for it, such as
    a daemon of Ray, would count as theirs. Here only the interval in which it ended is left out.

    Attributes:
        last: the clocks at the end of the last interval.
        counted_s, others_s: length of the intervals that count, and the others' part of it.
    """

    last: CpuTimes
    counted_s: float = 0.0
    others_s: float = 0.0

    def add(self, now: CpuTimes) -> None:
        """Take the interval up to *now* into account."""
        interval_s = now.at_s - self.last.at_s
        if interval_s > 0 and now.ours_s >= self.last.ours_s:
            self.counted_s += interval_s
            self.others_s += others_fraction(self.last, now) * interval_s
        self.last = now

    @property
    def fraction(self) -> float:
        """Share of the cores, 0 to 1; 0 before the first interval."""
        return self.others_s / self.counted_s if self.counted_s else 0.0


def _process_s(pid: int) -> float:
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system + times.children_user + times.children_system)
