"""The tandem: against a step-by-step simulation, and what must hold for any of them."""

from __future__ import annotations

import heapq
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from minicluster.plan.step_time import decode_s, prefill_s, transfer_s
from minicluster.specs.step import Interference
from minicluster.specs.workload import Lengths
from minicluster.workload.arrivals import poisson_arrivals
from sizing.queueing.forecast import at_rate, capacity_requests_per_s, couple, forecast
from sizing.queueing.prefill import batch_s
from sizing.queueing.spread import WEIGHTS, poisson
from tests.sizing.queues import PATH, STEP, tandem

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from sizing.queueing.stage import TandemLoad


class Simulation:
    """
    The deployed order, request by request and step by step, on an event queue.

    Decode replicas are chosen at arrival, by requests under way; prefill is first come first
    served; pulls start with a step and are noticed at the end of one.
    """

    def __init__(self, given: TandemLoad, *, count: int, seed: int) -> None:
        """Draw the requests."""
        self.given, load = given, given.workload
        arrived = poisson_arrivals(load, duration_s=count / load.requests_per_s, seed=seed)
        self.rng = np.random.default_rng(seed)
        self.due, self.prompt, self.output = (
            arrived.due_s,
            arrived.input_tokens,
            arrived.output_tokens,
        )
        model = given.step_model
        self.service = prefill_s(model.prefill, self.prompt)
        self.pull = transfer_s(model.path, self.prompt)
        self.first, self.last = np.zeros(len(self.due)), np.zeros(len(self.due))
        self.made = np.zeros(len(self.due), dtype=int)
        self.home = np.zeros(len(self.due), dtype=int)
        self.queues: list[list[int]] = [[] for _ in range(given.prefill.replicas)]
        size = given.decode.replicas
        self.under_way = [0] * size
        self.asked: list[list[int]] = [[] for _ in range(size)]
        self.pulling: list[list[tuple[float, int]]] = [[] for _ in range(size)]
        self.ready: list[list[int]] = [[] for _ in range(size)]
        self.batch: list[list[int]] = [[] for _ in range(size)]
        self.stepping = [False] * size
        self.events: list[tuple[float, int, str, int]] = []
        self.number = 0

    def at(self, when: float, what: str, who: int) -> None:
        """Note an event."""
        self.number += 1
        heapq.heappush(self.events, (when, self.number, what, who))

    def run(self) -> Simulation:
        """Run all requests to their end."""
        for i, due in enumerate(self.due):
            self.at(float(due) + self.given.step_model.path.request_s, "arrive", i)
        while self.events:
            now, _, what, who = heapq.heappop(self.events)
            getattr(self, what)(now, who)
        return self

    def shorter(self, lengths: list[int]) -> int:
        """Pick the shorter of two, drawn without replacement."""
        if len(lengths) == 1:
            return 0
        one, other = self.rng.choice(len(lengths), 2, replace=False)
        return int(other if lengths[other] < lengths[one] else one)

    def arrive(self, now: float, who: int) -> None:
        """Take a place at a decode replica, queue at a prefill replica."""
        self.home[who] = self.shorter(self.under_way)
        self.under_way[self.home[who]] += 1
        chosen = self.shorter([len(queue) for queue in self.queues])
        self.queues[chosen].append(who)
        if len(self.queues[chosen]) == 1:
            self.prefill(now, chosen)

    def prefill(self, now: float, where: int) -> None:
        """Start the first prompt of the queue."""
        slow = 1 + self.given.step_model.interference.prefill_fraction * np.mean(self.stepping)
        self.at(now + float(self.service[self.queues[where][0]]) * float(slow), "prefilled", where)

    def prefilled(self, now: float, where: int) -> None:
        """Hand a prompt over, start the next."""
        who = self.queues[where].pop(0)
        if self.queues[where]:
            self.prefill(now, where)
        home = int(self.home[who])
        self.asked[home].append(who)
        if not self.stepping[home]:
            self.step(now, home)

    def step(self, now: float, where: int) -> None:
        """Notice finished pulls, start new ones, decode one token of everybody."""
        done = [each for each in self.pulling[where] if each[0] <= now]
        self.ready[where] += [who for _, who in done]
        self.pulling[where] = [each for each in self.pulling[where] if each[0] > now]
        self.pulling[where] += [(now + float(self.pull[who]), who) for who in self.asked[where]]
        self.asked[where] = []
        room = self.given.decode.max_batch_size - len(self.batch[where])
        self.batch[where] += self.ready[where][:room]
        self.ready[where] = self.ready[where][room:]
        members = self.batch[where]
        self.stepping[where] = bool(members)
        if members:
            context = float(np.mean(self.prompt[members] + self.made[members]))
            slow = 1 + self.given.step_model.interference.decode_fraction * float(
                np.mean([bool(queue) for queue in self.queues])
            )
            seconds = float(decode_s(self.given.step_model.decode, len(members), context))
            self.at(now + seconds * slow, "stepped", where)
        elif self.pulling[where]:
            self.at(min(when for when, _ in self.pulling[where]), "pulled", where)

    def pulled(self, now: float, where: int) -> None:
        """Wake an idle replica whose pull has ended."""
        if not self.stepping[where]:
            self.step(now, where)

    def stepped(self, now: float, where: int) -> None:
        """Count the tokens made, let go who has all."""
        for who in list(self.batch[where]):
            self.made[who] += 1
            if self.made[who] == 1:
                self.first[who] = now
            if self.made[who] == self.output[who]:
                self.last[who] = now
                self.batch[where].remove(who)
                self.under_way[where] -= 1
        self.step(now, where)

    def measured(self) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        """Return TTFT, TPOT and end-to-end times, the first tenth cut."""
        cut = slice(len(self.due) // 10, None)
        tpot = (self.last - self.first) / np.maximum(1, self.output - 1)
        return (self.first - self.due)[cut], tpot[cut], (self.last - self.due)[cut]


SYSTEMS = {
    "one of each, half loaded": tandem(6.0),
    "one of each, loaded": tandem(9.0),
    "one of each, interfering": tandem(
        6.0, interference=Interference(prefill_fraction=0.2, decode_fraction=0.3)
    ),
    "pools": tandem(40.0, prefill=5, decode=2),
    "long answers": tandem(
        8.0,
        outputs=Lengths(distribution="lognormal", median=200.0, sigma=0.6, high=1000),
        decode=2,
    ),
}


def test_gaps_are_held_up_by_whole_requests() -> None:
    """What requests cost those that decode is in every mean alike, and in few gaps whole."""
    hold_s = 0.03
    plain, held = (
        forecast(tandem(6.0, interference=Interference(decode_per_request_s=each)))
        for each in (0.0, hold_s)
    )
    assert plain
    assert held

    assert held.itl.mean == pytest.approx(held.tpot.mean, rel=0.02)
    assert held.itl.mean > plain.itl.mean * 1.05
    assert held.itl.quantile(0.2) == pytest.approx(plain.itl.quantile(0.2), rel=0.1)
    assert held.itl.quantile(0.99) > plain.itl.quantile(0.99) + hold_s / 3


@pytest.mark.parametrize("mean", [0.01, 0.7, 30.0])
def test_poisson_numbers(mean: float) -> None:
    """The mean is exact, and as many are none as Poisson has it, to a bin."""
    found = poisson(mean * 0.5, 0.5)
    none = WEIGHTS[found.values < 0.25].sum()

    assert found.mean == pytest.approx(mean * 0.5, rel=1e-9)
    assert none == pytest.approx(np.exp(-mean), abs=0.01)


@pytest.mark.parametrize("system", SYSTEMS)
def test_against_a_step_by_step_simulation(system: str) -> None:
    """Means within 6 %, p95 within 12 %, p99 within 20 % of 6,000 simulated requests."""
    predicted = forecast(SYSTEMS[system])
    assert predicted is not None
    measured = Simulation(SYSTEMS[system], count=6_000, seed=5).run().measured()
    for name, spread, samples in zip(
        ("ttft", "tpot", "e2e"),
        (predicted.ttft, predicted.tpot, predicted.e2e),
        measured,
        strict=True,
    ):
        assert spread.mean == pytest.approx(samples.mean(), rel=0.06), name
        assert spread.quantile(0.95) == pytest.approx(np.percentile(samples, 95), rel=0.12), name
        assert spread.quantile(0.99) == pytest.approx(np.percentile(samples, 99), rel=0.2), name


def test_parts_add_up_to_the_mean_ttft() -> None:
    """The phases of TTFT add up to its mean, none is negative (eq. T13)."""
    for system in SYSTEMS.values():
        predicted = forecast(system)
        assert predicted is not None
        assert sum(predicted.parts_s.values()) == pytest.approx(predicted.ttft.mean)
        assert min(predicted.parts_s.values()) >= 0


def test_an_idle_system_takes_the_sum_of_its_phases() -> None:
    """Without load TTFT is overhead, prefill, pull and one step; TPOT is one step (eq. T13)."""
    fixed = tandem(1e-6, inputs=Lengths.fixed(1500), outputs=Lengths.fixed(100))
    predicted = forecast(fixed)
    assert predicted is not None
    prefill, pull = float(prefill_s(STEP, 1500)), float(transfer_s(PATH, 1500))
    step = float(decode_s(STEP, 1, 1550))
    assert predicted.ttft.quantile(0.99) == pytest.approx(0.01 + prefill + pull + step, rel=1e-4)
    assert predicted.tpot.quantile(0.99) == pytest.approx(step, rel=1e-3)


def test_interference_is_the_smallest_fixed_point() -> None:
    """Decode is slowed by prefill's busy share, prefill by serving (eq. T12)."""
    system = SYSTEMS["one of each, interfering"]
    found = couple(system)
    assert found is not None
    assert found.prefill_slowdown == pytest.approx(1.2)
    assert found.decode_slowdown == pytest.approx(1 + 0.3 * found.prefill_busy)
    alone = couple(SYSTEMS["one of each, half loaded"])
    assert alone is not None
    assert (alone.prefill_slowdown, alone.decode_slowdown) == (1, 1)
    assert found.prefill_busy > alone.prefill_busy


@pytest.mark.parametrize("system", SYSTEMS)
def test_capacity_is_where_queues_stop_ending(system: str) -> None:
    """Just below its capacity a system has latencies, just above it none."""
    capacity = capacity_requests_per_s(SYSTEMS[system])
    assert forecast(at_rate(SYSTEMS[system], capacity * 0.99)) is not None
    assert forecast(at_rate(SYSTEMS[system], capacity * 1.01)) is None


@settings(max_examples=15, deadline=None, derandomize=True, phases=(Phase.explicit, Phase.generate))
@given(
    share=st.floats(0.05, 0.9),
    more=st.floats(1.02, 1.1),
    prefill=st.integers(1, 6),
    decode=st.integers(1, 4),
    prompt=st.integers(50, 4000),
    answer=st.integers(2, 400),
    slower=st.floats(0, 0.3),
)
def test_more_load_and_slower_hardware_never_help(  # noqa: PLR0913  (what varies)
    *, share: float, more: float, prefill: int, decode: int, prompt: int, answer: int, slower: float
) -> None:
    """No latency falls when load is added, interference grows, or steps take longer."""
    system = tandem(
        prefill=prefill,
        decode=decode,
        inputs=Lengths.fixed(prompt),
        outputs=Lengths.fixed(answer),
        interference=Interference(prefill_fraction=slower, decode_fraction=slower),
    )
    system = at_rate(system, share * capacity_requests_per_s(system))
    base = forecast(system)
    assert base is not None
    step = replace(STEP, base_s=STEP.base_s * 1.1, per_prefill_token_s=5.5e-5, stream_s=6.6e-3)
    heavier = [
        at_rate(system, system.workload.requests_per_s * more),
        replace(system, step_model=replace(system.step_model, prefill=step, decode=step)),
    ]
    for worse in map(forecast, heavier):
        if worse is None:
            continue
        for name in ("ttft", "tpot", "itl", "e2e"):
            before, after = getattr(base, name), getattr(worse, name)
            assert after.mean >= before.mean * (1 - 5e-3), name
            for level in (0.5, 0.95, 0.99):
                assert after.quantile(level) >= before.quantile(level) * (1 - 2e-2), (name, level)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(share=st.floats(0.1, 0.9))
def test_percentiles_are_ordered(share: float) -> None:
    """Percentiles ascend, and no gap is shorter than half a lone step."""
    system = SYSTEMS["long answers"]
    predicted = forecast(at_rate(system, share * capacity_requests_per_s(system)))
    assert predicted is not None
    for spread in (predicted.ttft, predicted.tpot, predicted.itl, predicted.e2e):
        assert (np.diff(spread.values) >= 0).all()
        assert spread.values[0] > 0


@pytest.mark.parametrize("rate", [60.0, 110.0, 150.0])
def test_batched_prefill_against_simulation(rate: float) -> None:
    """Short prompts prefilled up to four at a time: mean wait within 25 % of a simulation (T6)."""
    short = tandem(rate, inputs=Lengths.fixed(100), outputs=Lengths.fixed(2))
    batched = replace(short, prefill=replace(short.prefill, max_batch_size=4))
    predicted = forecast(batched)
    assert predicted is not None
    due = np.cumsum(np.random.default_rng(3).exponential(1 / rate, 40_000))
    free, i = 0.0, 0
    waits: list[float] = []
    while i < len(due):
        start = max(free, float(due[i]))
        size = min(4, int(np.searchsorted(due, start, side="right")) - i)
        waits += [start - float(when) for when in due[i : i + size]]
        free, i = start + batch_s(batched, size), i + size
    assert predicted.parts_s["prefill queue"] == pytest.approx(np.mean(waits), rel=0.25)
