"""What other processes take of the cores, from the kernel's own clocks."""

from __future__ import annotations

import os
from types import SimpleNamespace

import psutil
import pytest

from minicluster.contention import ContentionMeter, CpuTimes, cpu_times, others_fraction


def at(at_s: float, busy_s: float, ours_s: float) -> CpuTimes:
    return CpuTimes(at_s=at_s, busy_s=busy_s, ours_s=ours_s, cores=2)


@pytest.mark.parametrize(
    ("busy_s", "ours_s", "fraction"),
    [(0.0, 0.0, 0.0), (10.0, 10.0, 0.0), (10.0, 4.0, 0.3), (20.0, 0.0, 1.0), (3.0, 3.5, 0.0)],
)
def test_what_is_busy_and_not_ours_is_others(busy_s: float, ours_s: float, fraction: float) -> None:
    assert others_fraction(at(5.0, 1.0, 1.0), at(15.0, 1.0 + busy_s, 1.0 + ours_s)) == fraction


def test_our_own_time_is_counted() -> None:
    start, spent = cpu_times([os.getpid()]), os.times()
    while sum(os.times()[:2]) - sum(spent[:2]) < 0.3:
        pass
    end = cpu_times([os.getpid()])

    assert end.ours_s - start.ours_s == pytest.approx(0.3, abs=0.05)
    assert end.cores == len(os.sched_getaffinity(0))


def test_what_is_idle_or_a_guest_is_not_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a core's times user, nice, system, interrupts and steal count; user holds guest."""
    names = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal", "guest")
    core = SimpleNamespace(**{name: 2**k for k, name in enumerate(names)})
    monkeypatch.setattr(psutil, "cpu_times", lambda *, percpu: [core] * 1024 * percpu)

    assert cpu_times([]).busy_s == (1 + 2 + 4 + 32 + 64 + 128) * len(os.sched_getaffinity(0))


def test_a_process_that_is_gone_has_no_time() -> None:
    """Pids that end between two looks are left out."""
    assert cpu_times([2**22 + 1]).ours_s == 0.0


def test_our_processes_that_ended_are_not_others() -> None:
    """An interval in which a daemon of ours ended says nothing; those around it do."""
    meter = ContentionMeter(at(0.0, 0.0, 0.0))
    meter.add(at(10.0, 20.0, 14.0))  # 6 of 20 core seconds
    meter.add(at(15.0, 30.0, 2.0))  # 12 s or more of ours have gone
    meter.add(at(25.0, 34.0, 4.0))  # 2 of 20

    assert meter.fraction == pytest.approx((6 + 2) / 40)
    assert others_fraction(at(0.0, 0.0, 0.0), at(25.0, 34.0, 4.0)) == pytest.approx(0.6)
    assert ContentionMeter(at(0.0, 0.0, 0.0)).fraction == 0.0
