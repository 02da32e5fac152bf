from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.promise import count_good, judge, parse_slo
from loadtest.samples import Sample
from sizing.errors import InputError
from sizing.specs.slo import SloSpec

if TYPE_CHECKING:
    from conftest import SampleMaker

SLO = SloSpec(ttft_s=1.0, tpot_s=0.05, percentile="p90")


def answered(ttfts: list[float]) -> list[Sample]:
    """Answer one request with each TTFT."""
    return [
        Sample(
            index=index,
            in_window=True,
            due_s=0.0,
            send_s=0.0,
            end_s=ttft,
            asked_input_tokens=1,
            asked_output_tokens=1,
            input_tokens=1,
            output_tokens=1,
            chunk_s=(ttft,),
            chunk_tokens=(1,),
            outcome="ok",
        )
        for index, ttft in enumerate(ttfts)
    ]


@given(st.lists(st.floats(0, 2), max_size=200), st.integers(0, 50))
def test_kept_means_the_share_was_within(ttfts: list[float], num_lost: int) -> None:
    """A promise at p90 is kept exactly if 90 % of all requests, lost ones too, are within."""
    promise = judge(SLO, answered(ttfts), num_lost)[0]
    within = sum(ttft <= 1.0 for ttft in ttfts)

    assert promise.num == len(ttfts) + num_lost
    assert promise.num_missed == promise.num - within
    assert promise.kept == (promise.num > 0 and 10 * within >= 9 * promise.num)


def test_requests_without_an_answer_are_no_latency(make_sample: SampleMaker) -> None:
    """Lost requests move the percentile to no value at all, never to a number."""
    promise = judge(SLO, [make_sample()] * 80, 20)[0]

    assert promise.measured_s is None
    assert not promise.kept


def test_answer_in_one_chunk_keeps_its_tpot(make_sample: SampleMaker) -> None:
    """Where there is no second chunk there is no time between chunks to miss."""
    _, tpot = judge(SLO, [make_sample(num_output=1)] * 40, 0)

    assert tpot.kept


def test_lost_answers_lose_their_gaps(make_sample: SampleMaker) -> None:
    """An ITL promise counts the gaps that a lost answer never showed."""
    itl = judge(
        SloSpec(tpot_s=None, itl_s=0.05, percentile="p90"), [make_sample()] * 8, num_unanswered=2
    )[1]

    assert (itl.num, itl.num_missed, itl.kept) == (90, 18, False)


@pytest.mark.parametrize(
    ("num", "num_lost", "conclusive"),
    [(368, 0, True), (367, 0, False), (90, 4, True), (91, 3, False)],
)
def test_too_few_requests_are_inconclusive(num: int, num_lost: int, *, conclusive: bool) -> None:
    """p99 needs 368 requests, unless so many missed that no number more could mend it."""
    promise = judge(SloSpec(tpot_s=None), answered([0.1] * num), num_lost)[0]

    assert promise.conclusive is conclusive


def test_good_requests_meet_every_limit(make_sample: SampleMaker) -> None:
    """Goodput counts the requests that kept all of their limits."""
    samples = [
        make_sample(),
        make_sample(ttft_s=1.5),
        make_sample(itl_s=0.06),
        make_sample(lag_s=0.99),
    ]

    assert count_good(SLO, samples) == 1


def test_slo_is_read() -> None:
    """What is named is promised, what is not is not."""
    assert parse_slo("ttft=2") == SloSpec(ttft_s=2, tpot_s=None)
    assert parse_slo("ttft=1, tpot=0.05,itl=0.1,percentile=p95") == SloSpec(
        ttft_s=1, tpot_s=0.05, itl_s=0.1, percentile="p95"
    )


@pytest.mark.parametrize(
    "text", ["", "ttft", "ttft=x", "tpot=0.05", "ttft=1,e2e=3", "ttft=-1", "ttft=1,percentile=p42"]
)
def test_bad_slo_is_refused(text: str) -> None:
    """Anything else gets one line."""
    with pytest.raises(InputError):
        parse_slo(text)
