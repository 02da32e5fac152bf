from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.run.folder import Promise
from loadtest.verdict.slo import good, judge, judge_limit, late, parse_slo, undecided
from minicluster.errors import InputError
from minicluster.specs.slo import SloSpec
from minicluster.stats.confidence import design_effect
from minicluster.stats.shares import LEVELS, samples_needed
from minicluster.workload.samples import Sample
from tests.loadtest.made import make_sample

SLO = SloSpec(ttft_s=1.0, tpot_s=0.05, percentile="p90")
SLOW = replace(SLO, ttft_s=3.0)
GAPS = SloSpec(tpot_s=None, itl_s=0.05, percentile="p90")


def answered(ttfts: list[float]) -> list[Sample]:
    return [make_sample(k, ttft_s=ttft_s, num_output=1) for k, ttft_s in enumerate(ttfts)]


@given(st.lists(st.floats(0, 2), max_size=200), st.integers(0, 50))
def test_the_percentile_says_what_the_share_says(ttfts: list[float], num_lost: int) -> None:
    """A p90 within its limit, and 90 % of all requests, lost ones too, within it, are the same."""
    result = judge(SLO, [*answered(ttfts), *[None] * num_lost])[0]
    within = sum(ttft <= 1.0 for ttft in ttfts)
    measured = result.measured_s

    assert result.num == len(ttfts) + num_lost
    assert result.num_missed == result.num - within
    assert result.attained_low <= result.attained_fraction <= result.attained_high
    assert (measured is not None and measured <= 1.0) == (
        result.num > 0 and 10 * within >= 9 * result.num
    )


@given(st.lists(st.floats(0, 2), min_size=10, max_size=500), st.sampled_from(["p50", "p90", "p99"]))
def test_a_verdict_is_what_the_interval_leaves_no_doubt_of(
    ttfts: list[float], percentile: str
) -> None:
    """Kept and missed say on which side the interval lies; open says how many would tell."""
    result = judge_limit("ttft", np.array(ttfts), limit_s=1.0, percentile=percentile)
    level = LEVELS[percentile]
    enough = len(ttfts) >= samples_needed(level)

    assert (result.verdict == "met") == (enough and result.attained_low >= level)
    below = result.attained_high < level and result.num_missed > 1
    assert (result.verdict == "missed") == below
    if result.verdict == "inconclusive" and result.num_needed is not None:
        assert result.num_needed > result.num


def test_lost_answers_lose_their_gaps() -> None:
    """An ITL promise counts the gaps that a lost answer never showed."""
    itl = judge(GAPS, [*[make_sample()] * 7, make_sample(num_output=11), None, None])[1]

    assert (itl.num, itl.num_missed) == (73 + 2 * 10, 20)


def test_gaps_of_few_requests_prove_nothing() -> None:
    """Thousands of gaps are no p99 if a hundred requests made them."""
    samples = [make_sample(k, k / 10, num_output=51) for k in range(100)]
    itl = judge(replace(GAPS, percentile="p99"), samples)[1]

    assert (itl.num, itl.num_requests, itl.verdict) == (5000, 100, "inconclusive")
    assert itl.num_needed == samples_needed(0.99)


def test_a_stall_of_many_streams_is_one_event() -> None:
    """Gaps that end together say as much as few: request by request they lie far apart."""
    stalled = []
    for k in range(500):
        sample = make_sample(k, k / 50, num_output=40, itl_s=0.05)
        late = [t + 0.2 * sum(t > stall for stall in range(1, 12, 2)) for t in sample.chunk_s]
        stalled.append(replace(sample, chunk_s=tuple(late), end_s=late[-1]))
    itl = judge(replace(GAPS, itl_s=0.1), stalled)[1]
    requests = np.concatenate([s.gaps_s for s in stalled])

    assert itl.design_effect > 3 * design_effect(requests).estimate


@pytest.mark.parametrize(
    ("percentile", "num", "every", "verdict"),
    [
        # An interval that ends below the share is a miss, however few requests there are.
        ("p99", 500, 8, "missed"), ("p95", 500, 8, "missed"), ("p90", 500, 8, "inconclusive"),
        ("p90", 200, 4, "missed"), ("p99", 60, 20, "missed"), ("p99", 60, 50, "inconclusive"),
        ("p50", 30, 1, "missed"), ("p50", 30, 2, "inconclusive"), ("p99", 4, 1, "missed"),
    ],
)  # fmt: skip
def test_an_interval_below_the_share_is_a_miss(
    percentile: str, num: int, every: int, verdict: str
) -> None:
    """Every so many requests without an answer, evenly: 88 % of 500 are no p95."""
    values = np.array([np.inf if k % every == every - 1 else 0.1 for k in range(num)])
    found = judge_limit("ttft", values, limit_s=1.0, percentile=percentile)

    assert found.verdict == verdict
    assert (found.attained_high < LEVELS[percentile]) == (verdict == "missed")


IN_FLIGHT = make_sample(9, 10.0, ttft_s=None, outcome="unfinished", end_s=10.5, num_output=11)
BEGUN = make_sample(9, 10.0, ttft_s=0.2, num_output=4, outcome="unfinished", end_s=10.5)
BEGUN = replace(BEGUN, asked_output_tokens=11)


@pytest.mark.parametrize(
    ("request_", "metric", "limit_s", "beyond"),
    [
        (IN_FLIGHT, "ttft", 0.6, False), (IN_FLIGHT, "ttft", 0.4, True),
        (IN_FLIGHT, "e2e", 0.6, False), (IN_FLIGHT, "e2e", 0.4, True),
        (IN_FLIGHT, "tpot", 0.001, False), (IN_FLIGHT, "itl", 0.001, False),
        # The first token came after 0.2 s, the last so far at 0.26; ten are missing in all.
        (BEGUN, "ttft", 0.3, False), (BEGUN, "ttft", 0.1, True), (BEGUN, "e2e", 0.4, True),
        (BEGUN, "tpot", 0.031, False), (BEGUN, "tpot", 0.029, True),
        (BEGUN, "itl", 0.25, False), (BEGUN, "itl", 0.23, True),
        (None, "ttft", 1.0, True),
    ],
)  # fmt: skip
def test_a_request_in_flight_is_late_once_nothing_can_save_it(
    request_: Sample | None, metric: str, limit_s: float, *, beyond: bool
) -> None:
    assert late(request_, metric, limit_s) == beyond


def test_requests_in_flight_at_the_end_are_neither_met_nor_missed() -> None:
    """But those that are late already; an answer counts whatever was in flight beside it."""
    slo = SloSpec(ttft_s=0.4, tpot_s=0.05, percentile="p50")
    ttft, tpot = judge(slo, [*answered([0.1] * 50), IN_FLIGHT, BEGUN])

    assert (ttft.num, ttft.num_missed) == (51, 1)
    assert (tpot.num, tpot.num_missed) == (50, 0)
    assert [undecided(slo, each) for each in (IN_FLIGHT, BEGUN, make_sample(), None)] == [
        False, True, False, False,
    ]  # fmt: skip


def test_good_requests_meet_every_limit() -> None:
    samples = [
        make_sample(),
        make_sample(ttft_s=1.5),
        make_sample(itl_s=0.06),
        make_sample(lag_s=0.99),
    ]
    answered = dict(enumerate(samples))

    for slo, met in ((SLO, {0}), (GAPS, {0}), (replace(SLO, ttft_s=2, e2e_s=1), {0})):
        assert good([Promise("", slo, frozenset(answered))], answered) == met
    classes = [Promise("quick", SLO, frozenset({0, 2})), Promise("slow", SLOW, frozenset({1, 3}))]
    assert good(classes, answered) == {0, 1, 3}


def test_every_answer_has_an_e2e_latency_that_a_limit_is_judged_at() -> None:
    samples = [make_sample(k, k / 50, itl_s=0.01 if k % 20 else 0.04) for k in range(4000)]
    usual_s = samples[1].e2e_s

    for limit_s, verdict in ((1.01 * usual_s, "met"), (0.99 * usual_s, "missed")):
        slo = SloSpec(ttft_s=9, tpot_s=None, e2e_s=limit_s, percentile="p90")
        _, e2e = judge(slo, samples)
        assert (e2e.name, e2e.verdict) == ("E2E p90", verdict)


def test_slo_is_read() -> None:
    assert parse_slo("ttft=2") == SloSpec(ttft_s=2, tpot_s=None)
    assert parse_slo("ttft=1, tpot=0.05,itl=0.1,percentile=p95") == SloSpec(
        ttft_s=1, tpot_s=0.05, itl_s=0.1, percentile="p95"
    )
    assert parse_slo("ttft=1,e2e=20") == SloSpec(ttft_s=1, tpot_s=None, e2e_s=20)
    for text in ("", "ttft", "ttft=x", "tpot=0.05", "ttft=1,e3e=3", "ttft=-1"):
        with pytest.raises(InputError):
            parse_slo(text)
