from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loadtest.verdict.prediction import TOLERANCE, parse_tolerance
from loadtest.verdict.verdict import VERDICTS, Verdict, conclude, to_json
from loadtest.verdict.window import measurement_window
from minicluster.errors import Exit, InputError
from minicluster.workload.run_verdict import read_run_verdict
from minicluster.workload.samples import Sample
from tests.loadtest.made import make_run, make_sample

GOOD = [make_sample(k, k / 480) for k in range(4800)]
"""4,800 requests over the window, answered as the plan predicts."""


def judged(samples: list[Sample], **client: object) -> Verdict:
    return conclude(make_run(samples, **client), TOLERANCE, require_prediction=False)


def test_slo_met() -> None:
    """Latencies within every limit, in sufficient number, from a healthy client: exit 0."""
    verdict = judged(GOOD)

    assert (verdict.verdict, verdict.exit) == ("met", Exit.DONE)
    assert verdict.comparison
    assert verdict.comparison.held
    assert verdict.latency["ttft"]
    assert verdict.latency["ttft"].mean_s == pytest.approx(0.05)
    assert verdict.throughput.good_requests_per_s == pytest.approx(480.0)
    assert verdict.throughput.good_fraction == 1.0


def test_failures_are_misses_and_no_latencies() -> None:
    """2.5 % of failed requests miss a p99; the latencies of the others stay as they are."""
    clean = judged(GOOD)
    failed = [replace(s, outcome="timeout", chunk_s=(), end_s=40.0) for s in GOOD[::40]]
    left = [s for s in GOOD if s.index % 40]
    verdict = judged(failed + left)

    assert (verdict.verdict, verdict.exit) == ("missed", Exit.NEGATIVE)
    assert "120 of 4800" in verdict.reasons[0]
    assert verdict.outcomes == {"timeout": 120, "ok": 4680}
    assert verdict.throughput.good_fraction == pytest.approx(4680 / 4800)
    assert verdict.throughput.good_requests_per_s == pytest.approx(468.0)
    assert verdict.latency["ttft"]
    assert clean.latency["ttft"]
    assert verdict.latency["ttft"].max_s == pytest.approx(clean.latency["ttft"].max_s)


@pytest.mark.parametrize(("sent", "verdict"), [(4785, "inconclusive"), (4650, "invalid")])
def test_requests_never_sent_are_misses(sent: int, verdict: str) -> None:
    """What was scheduled and has no sample is a miss; more than 1 % of them prove nothing."""
    run = make_run(GOOD)
    found = conclude(replace(run, samples=run.samples[:sent]), TOLERANCE, require_prediction=False)

    assert found.outcomes["not_sent"] == 4800 - sent
    assert found.slo[0].num_missed == 4800 - sent
    assert found.verdict == verdict


def test_slow_answers_miss() -> None:
    slow = [make_sample(k, k / 480, ttft_s=0.1 if k % 40 else 1.2) for k in range(4800)]
    verdict = judged(slow)

    assert verdict.exit == Exit.NEGATIVE
    assert verdict.reasons == (
        "TTFT p99 is 1200.0 ms, more than the SLO limit of 1000 ms (120 of 4800 missed it)",
    )


def test_lateness_of_the_client_counts() -> None:
    """TTFT runs from the scheduled arrival, not from the send."""
    late = [make_sample(k, k / 40, lag_s=0.04) for k in range(400)]
    verdict = judged(late)

    assert verdict.latency["ttft"]
    assert verdict.latency["ttft_from_send"]
    assert verdict.latency["ttft"].mean_s == pytest.approx(0.09)
    assert verdict.latency["ttft_from_send"].mean_s == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("changes", "client", "verdict", "reason"),
    [
        ({}, {"cpu_fraction": 0.95}, "invalid", "95% of its core"),
        ({}, {"heartbeat_lag_s": (0.2,) * 100}, "invalid", "of a TTFT"),
        ({"send_s": 100.0}, {}, "invalid", "of a TTFT"),
        ({"output_tokens": 9}, {}, "invalid", "ignore_eos"),
        ({"cached_tokens": 16}, {}, "invalid", "50% of the prompt tokens"),
        ({}, {"stop": "short of a worker"}, "invalid", "short of a worker"),
        ({}, {"stop": "interrupted"}, "interrupted", "interrupted"),
        ({}, {"stop": "died"}, "failed", "stopped answering"),
        ({"outcome": "cut", "detail": "reset", "chunk_s": ()}, {}, "failed", "no request: reset"),
    ],
)
def test_a_run_that_proves_nothing_says_why(
    changes: dict[str, Any], client: dict[str, Any], verdict: str, reason: str
) -> None:
    """Whatever its latencies are; an unfit client or other work than planned make it invalid."""
    found = judged([replace(s, **changes) for s in GOOD], **client)

    assert (found.verdict, found.exit) == (verdict, VERDICTS[verdict])
    assert any(reason in why for why in found.reasons)


def test_too_few_samples_prove_nothing() -> None:
    """With 100 requests there is no p99; the verdict says how many minutes more it takes."""
    verdict = judged(GOOD[:100])

    assert (verdict.verdict, verdict.exit) == ("inconclusive", Exit.INCONCLUSIVE)
    assert "TTFT p99: 100.00% of 100 within 1000 ms" in verdict.reasons[0]
    assert re.search(r"needs about [\d.]+ minutes more", verdict.reasons[0])


def test_a_conversation_may_find_itself_in_the_cache() -> None:
    """What was said before is in the cache by right; what nobody said is not."""
    told = [replace(s, cached_tokens=16 if s.index % 2 else 0) for s in GOOD]
    run = make_run(told)
    turns = tuple(
        replace(r, session=k // 2, previous=k - 1 if k % 2 else None, input_tokens=8)
        for k, r in enumerate(run.schedule)
    )

    assert measurement_window(replace(run, schedule=turns)).cached_fraction == 0.0
    assert measurement_window(run).cached_fraction == pytest.approx(0.25)


def test_what_settles_late_is_cut() -> None:
    """Latencies that fall from a cold start are warm-up, whatever the window said."""
    cold = [
        make_sample(k, k / 480, ttft_s=2.0 if k < 600 else 0.05 + k % 7 / 1000) for k in range(4800)
    ]
    verdict = judged(cold)

    assert verdict.verdict == "met"
    assert verdict.window.start_s == pytest.approx(1.25, abs=0.05)
    assert "the warm-up was extended by" in verdict.notes[0]


def test_no_more_than_half_of_the_window_is_cut() -> None:
    """Where most requests come late in the window, a cold start there costs its first half."""
    late = [
        make_sample(k, 8 + k / 2400, ttft_s=2.0 if k < 600 else 0.05 + k % 7 / 1000)
        for k in range(4800)
    ]
    window = judged(late).window

    assert (window.start_s, window.length_s) == (5.0, 5.0)


def test_an_overloaded_target_misses() -> None:
    """Latencies that rise to the end of the run are no warm-up: more comes than is answered."""
    rising = [make_sample(k, k / 480, ttft_s=0.1 + k / 2000) for k in range(4800)]
    verdict = judged(rising)

    assert not verdict.window.settled
    assert verdict.verdict == "missed"


@pytest.mark.parametrize(("every", "verdict"), [(80, "invalid"), (200, "met")])
@pytest.mark.parametrize("side", ["input_tokens", "output_tokens"])
def test_hardly_any_length_may_be_wrong(side: str, every: int, verdict: str) -> None:
    """More than 1 % of the answers of another length than asked, in or out, prove nothing."""
    lengths = [replace(s, **{side: 7}) if s.index % every == 0 else s for s in GOOD]

    assert judged(lengths).verdict == verdict


def test_prediction_missed() -> None:
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


def test_json_holds_everything() -> None:
    """The verdict is JSON with a schema version, even where nothing was measured."""
    nothing = [replace(s, outcome="timeout", chunk_s=()) for s in GOOD]
    for samples in (GOOD, nothing):
        written = json.loads(to_json(judged(samples)))

        assert written["schema_version"] == 4
        assert {"verdict", "slo", "latency", "comparison", "client"} <= set(written)


def test_sizing_reads_the_verdict(tmp_path: Path) -> None:
    """`sizing calibrate` takes the verdict, its reasons and the start of what counts from it."""
    verdict = judged(GOOD)
    path = tmp_path / "verdict.json"
    path.write_text(to_json(verdict))

    found = read_run_verdict(path)
    assert found is not None
    assert (found.verdict, found.reasons) == (verdict.verdict, verdict.reasons)
    assert found.start_s == verdict.window.start_s


def test_tolerance_is_read() -> None:
    assert parse_tolerance("0.2") == {"ttft": 0.2, "tpot": 0.2}
    assert parse_tolerance("ttft=0.1,e2e=0.2") == {"ttft": 0.1, "e2e": 0.2}


@pytest.mark.parametrize("text", ["", "x", "ttft=", "speed=0.1", "-0.1", "ttft=0.1,tpot"])
def test_bad_tolerance_is_refused(text: str) -> None:
    with pytest.raises(InputError):
        parse_tolerance(text)
