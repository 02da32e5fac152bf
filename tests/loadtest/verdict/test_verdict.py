from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from loadtest.verdict.prediction import TOLERANCE, parse_tolerance
from loadtest.verdict.verdict import Verdict, conclude, to_json
from loadtest.verdict.window import measurement_window
from minicluster.errors import Exit, InputError
from minicluster.workload.run_verdict import read_run_verdict

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import RunMaker, SampleMaker

    from minicluster.workload.samples import Sample


@pytest.fixture
def good(make_sample: SampleMaker) -> list[Sample]:
    """Answer 4,800 requests over the window as the plan predicts."""
    return [make_sample(k, k / 480) for k in range(4800)]


def judged(make_run: RunMaker, samples: list[Sample], **client: object) -> Verdict:
    """Judge a run of *samples*."""
    return conclude(make_run(samples, **client), TOLERANCE, require_prediction=False)


def test_slo_met(make_run: RunMaker, good: list[Sample]) -> None:
    """Latencies within every limit, in sufficient number, from a healthy client: exit 0."""
    verdict = judged(make_run, good)

    assert (verdict.verdict, verdict.exit) == ("met", Exit.DONE)
    assert verdict.comparison
    assert verdict.comparison.held
    assert verdict.latency["ttft"]
    assert verdict.latency["ttft"].mean_s == pytest.approx(0.05)
    assert verdict.throughput.good_requests_per_s == pytest.approx(480.0)
    assert verdict.throughput.good_fraction == 1.0


def test_failures_are_misses_and_no_latencies(make_run: RunMaker, good: list[Sample]) -> None:
    """2.5 % of failed requests miss a p99; the latencies of the others stay as they are."""
    clean = judged(make_run, good)
    failed = [replace(s, outcome="timeout", chunk_s=(), end_s=40.0) for s in good[::40]]
    left = [s for s in good if s.index % 40]
    verdict = judged(make_run, failed + left)

    assert (verdict.verdict, verdict.exit) == ("missed", Exit.NEGATIVE)
    assert "120 of 4800" in verdict.reasons[0]
    assert verdict.outcomes == {"timeout": 120, "ok": 4680}
    assert verdict.throughput.good_fraction == pytest.approx(4680 / 4800)
    assert verdict.throughput.good_requests_per_s == pytest.approx(468.0)
    assert verdict.latency["ttft"]
    assert clean.latency["ttft"]
    assert verdict.latency["ttft"].max_s == pytest.approx(clean.latency["ttft"].max_s)


@pytest.mark.parametrize(("sent", "verdict"), [(4785, "inconclusive"), (4650, "invalid")])
def test_requests_never_sent_are_misses(
    make_run: RunMaker, good: list[Sample], sent: int, verdict: str
) -> None:
    """What was scheduled and has no sample is a miss; more than 1 % of them prove nothing."""
    run = make_run(good)
    found = conclude(replace(run, samples=run.samples[:sent]), TOLERANCE, require_prediction=False)

    assert found.outcomes["not_sent"] == 4800 - sent
    assert found.slo[0].num_missed == 4800 - sent
    assert found.verdict == verdict


def test_slow_answers_miss(make_run: RunMaker, make_sample: SampleMaker) -> None:
    """A percentile above its limit: exit 3, with value, limit and how many missed."""
    slow = [make_sample(k, k / 480, ttft_s=0.1 if k % 40 else 1.2) for k in range(4800)]
    verdict = judged(make_run, slow)

    assert verdict.exit == Exit.NEGATIVE
    assert verdict.reasons == (
        "TTFT p99 is 1200.0 ms, more than the SLO limit of 1000 ms (120 of 4800 missed it)",
    )


def test_lateness_of_the_client_counts(make_run: RunMaker, make_sample: SampleMaker) -> None:
    """TTFT runs from the scheduled arrival, not from the send."""
    late = [make_sample(k, k / 40, lag_s=0.04) for k in range(400)]
    verdict = judged(make_run, late)

    assert verdict.latency["ttft"]
    assert verdict.latency["ttft_from_send"]
    assert verdict.latency["ttft"].mean_s == pytest.approx(0.09)
    assert verdict.latency["ttft_from_send"].mean_s == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("client", "why"),
    [
        ({"cpu_fraction": 0.95}, "95% of its core"),
        ({"heartbeat_lag_s": (0.2,) * 100}, "of a TTFT"),
    ],
)
def test_saturated_client_proves_nothing(
    make_run: RunMaker, good: list[Sample], client: dict[str, object], why: str
) -> None:
    """Numbers of a client that could not keep up are no verdict, good or bad: exit 4."""
    verdict = judged(make_run, good, **client)

    assert (verdict.verdict, verdict.exit) == ("invalid", Exit.INCONCLUSIVE)
    assert any(why in reason for reason in verdict.reasons)


def test_late_dispatch_proves_nothing(make_run: RunMaker, make_sample: SampleMaker) -> None:
    """A client that sends 200 ms late has closed the open loop."""
    late = [make_sample(k, k / 40, lag_s=0.2) for k in range(400)]

    assert judged(make_run, late).exit == Exit.INCONCLUSIVE


def test_too_few_samples_prove_nothing(make_run: RunMaker, good: list[Sample]) -> None:
    """With 100 requests there is no p99; the verdict says how many minutes more it takes."""
    verdict = judged(make_run, good[:100])

    assert (verdict.verdict, verdict.exit) == ("inconclusive", Exit.INCONCLUSIVE)
    assert "TTFT p99: 100.00% of 100 within 1000 ms" in verdict.reasons[0]
    assert re.search(r"needs about [\d.]+ minutes more", verdict.reasons[0])


def test_a_warm_prefix_cache_proves_nothing(make_run: RunMaker, good: list[Sample]) -> None:
    """Prompts that were in the prefix cache, which the workload does not share, cost nothing."""
    verdict = judged(make_run, [replace(s, cached_tokens=16) for s in good])

    assert verdict.verdict == "invalid"
    assert "50% of the prompt tokens" in verdict.reasons[0]


def test_a_conversation_may_find_itself_in_the_cache(
    make_run: RunMaker, good: list[Sample]
) -> None:
    """What was said before is in the cache by right; what nobody said is not."""
    told = [replace(s, cached_tokens=16 if s.index % 2 else 0) for s in good]
    run = make_run(told)
    turns = tuple(
        replace(r, session=k // 2, previous=k - 1 if k % 2 else None, input_tokens=8)
        for k, r in enumerate(run.schedule)
    )

    assert measurement_window(replace(run, schedule=turns)).cached_fraction == 0.0
    assert measurement_window(run).cached_fraction == pytest.approx(0.25)


def test_what_settles_late_is_cut(make_run: RunMaker, make_sample: SampleMaker) -> None:
    """Latencies that fall from a cold start are warm-up, whatever the window said."""
    cold = [
        make_sample(k, k / 480, ttft_s=2.0 if k < 600 else 0.05 + k % 7 / 1000) for k in range(4800)
    ]
    verdict = judged(make_run, cold)

    assert verdict.verdict == "met"
    assert verdict.window.start_s == pytest.approx(1.25, abs=0.05)
    assert "the warm-up was extended by" in verdict.notes[0]


def test_no_more_than_half_of_the_window_is_cut(
    make_run: RunMaker, make_sample: SampleMaker
) -> None:
    """Where most requests come late in the window, a cold start there costs its first half."""
    late = [
        make_sample(k, 8 + k / 2400, ttft_s=2.0 if k < 600 else 0.05 + k % 7 / 1000)
        for k in range(4800)
    ]
    window = judged(make_run, late).window

    assert (window.start_s, window.length_s) == (5.0, 5.0)


def test_an_overloaded_target_misses(make_run: RunMaker, make_sample: SampleMaker) -> None:
    """Latencies that rise to the end of the run are no warm-up: more comes than is answered."""
    rising = [make_sample(k, k / 480, ttft_s=0.1 + k / 2000) for k in range(4800)]
    verdict = judged(make_run, rising)

    assert not verdict.window.settled
    assert verdict.verdict == "missed"


def test_wrong_lengths_prove_nothing(make_run: RunMaker, good: list[Sample]) -> None:
    """A server that generates other lengths than asked did other work than planned."""
    short = [replace(s, output_tokens=9) for s in good]
    verdict = judged(make_run, short)

    assert verdict.exit == Exit.INCONCLUSIVE
    assert "ignore_eos" in verdict.reasons[0]


@pytest.mark.parametrize(("every", "verdict"), [(80, "invalid"), (200, "met")])
@pytest.mark.parametrize("side", ["input_tokens", "output_tokens"])
def test_hardly_any_length_may_be_wrong(
    make_run: RunMaker, good: list[Sample], side: str, every: int, verdict: str
) -> None:
    """More than 1 % of the answers of another length than asked, in or out, prove nothing."""
    lengths = [replace(s, **{side: 7}) if s.index % every == 0 else s for s in good]

    assert judged(make_run, lengths).verdict == verdict


def test_dead_target(make_run: RunMaker, good: list[Sample]) -> None:
    """A target that died, or that answered nothing, failed: exit 5."""
    nothing = [replace(s, outcome="cut", detail="reset", chunk_s=()) for s in good]

    assert judged(make_run, good, stop="died").exit == Exit.TARGET_FAILED
    assert judged(make_run, nothing).exit == Exit.TARGET_FAILED
    assert "reset" in judged(make_run, nothing).reasons[0]


def test_interrupted(make_run: RunMaker, good: list[Sample]) -> None:
    """An interrupted run reports what it has, and is no verdict: exit 130."""
    verdict = judged(make_run, good[:50], stop="interrupted")

    assert verdict.exit == Exit.INTERRUPTED
    assert verdict.latency["ttft"]


def test_a_lost_worker_proves_nothing(make_run: RunMaker, good: list[Sample]) -> None:
    """A run whose client lost a process is invalid, not interrupted: exit 4, and why."""
    verdict = judged(make_run, good, stop="short of a worker")

    assert (verdict.verdict, verdict.exit) == ("invalid", Exit.INCONCLUSIVE)
    assert "short of a worker" in verdict.reasons[0]


def test_prediction_missed(make_run: RunMaker, make_sample: SampleMaker) -> None:
    """A missed prediction is a field of the verdict, and exit 3 only where it is required."""
    other = make_run([make_sample(k, k / 480, itl_s=0.04) for k in range(4800)])
    told = conclude(other, TOLERANCE, require_prediction=False)
    required = conclude(other, TOLERANCE, require_prediction=True)
    wide = conclude(other, {"tpot": 0.6}, require_prediction=True)

    assert told.comparison
    assert not told.comparison.held
    row = told.comparison.row("tpot", "mean")
    assert row
    assert row.error_fraction == pytest.approx(-0.5)
    assert (told.exit, required.exit, wide.exit) == (Exit.DONE, Exit.NEGATIVE, Exit.DONE)
    assert required.verdict == "met"


def test_json_holds_everything(make_run: RunMaker, good: list[Sample]) -> None:
    """The verdict is JSON with a schema version, even where nothing was measured."""
    nothing = [replace(s, outcome="timeout", chunk_s=()) for s in good]
    for samples in (good, nothing):
        written = json.loads(to_json(judged(make_run, samples)))

        assert written["schema_version"] == 4
        assert {"verdict", "slo", "latency", "comparison", "client"} <= set(written)


def test_sizing_reads_the_verdict(make_run: RunMaker, good: list[Sample], tmp_path: Path) -> None:
    """`sizing calibrate` takes the verdict, its reasons and the start of what counts from it."""
    verdict = judged(make_run, good)
    path = tmp_path / "verdict.json"
    path.write_text(to_json(verdict))

    found = read_run_verdict(path)
    assert found is not None
    assert (found.verdict, found.reasons) == (verdict.verdict, verdict.reasons)
    assert found.start_s == verdict.window.start_s


def test_tolerance_is_read() -> None:
    """One number stands for both means."""
    assert parse_tolerance("0.2") == {"ttft": 0.2, "tpot": 0.2}
    assert parse_tolerance("ttft=0.1,e2e=0.2") == {"ttft": 0.1, "e2e": 0.2}


@pytest.mark.parametrize("text", ["", "x", "ttft=", "speed=0.1", "-0.1", "ttft=0.1,tpot"])
def test_bad_tolerance_is_refused(text: str) -> None:
    """Anything else gets one line."""
    with pytest.raises(InputError):
        parse_tolerance(text)
