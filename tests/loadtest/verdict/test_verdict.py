from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loadtest.cli.studies import parse_tolerance
from loadtest.run.folder import as_json
from loadtest.run.schedule import ArrivalShape, Window, parse_stages
from loadtest.verdict.resimulation import PredictedRequest, Resimulation
from loadtest.verdict.verdict import VERDICTS, Verdict, find_stalls, pool_loads
from loadtest.verdict.window import measurement_window
from minicluster.errors import Exit, InputError
from minicluster.specs.slo import ClassSlo, SloSpec
from minicluster.specs.workload import Lengths, RequestClass, WorkloadSpec
from minicluster.workload.samples import Sample, read_run_verdict
from minicluster.workload.sources import RequestSource
from tests.loadtest.made import judged, make_plan, make_run, make_sample

GOOD = [make_sample(k, k / 480) for k in range(4800)]
"""4,800 requests over the window, answered as the plan predicts."""
COLD = [
    make_sample(k, k / 480, ttft_s=2.0 if k < 600 else 0.05 + k % 7 / 1000) for k in range(4800)
]
"""Latencies that fall from a cold start."""


TOO_SHORT = (
    "TTFT p99: 100.00% of 100 within 1.00 s (95 % interval 96.30% to 100.00%; design effect 1.0, "
    "effective n = 100); a p99 takes at least 3804 requests; needs about 6.2 minutes more "
    "(3704 requests)"
)


def verdict_on(samples: list[Sample], **client: object) -> Verdict:
    return judged(make_run(samples, **client))


def changed(every: int, **changes: Any) -> list[Sample]:  # noqa: ANN401
    return [replace(s, **changes) if s.index % every == 0 else s for s in GOOD]


def test_slo_met(tmp_path: Path) -> None:
    """Latencies within every limit, enough of them, a healthy client: exit 0; sizing reads it."""
    verdict = verdict_on(GOOD)
    (tmp_path / "verdict.json").write_text(as_json(verdict))
    found = read_run_verdict(tmp_path / "verdict.json")

    assert (verdict.verdict, verdict.exit_code) == ("met", Exit.DONE)
    assert verdict.comparison.held
    assert verdict.latency["ttft"].mean_s == pytest.approx(0.05)
    means = {name: each.mean_s for name, each in verdict.latency.items() if each}
    gaps = dict.fromkeys(("tpot", "itl", "longest_stall"), 0.02)
    assert means == pytest.approx({"ttft": 0.05, "ttft_from_send": 0.05, "e2e": 0.23, **gaps})
    flow = verdict.throughput
    assert flow.offered_requests_per_s == flow.answered_requests_per_s == pytest.approx(480.0)
    assert flow.good_requests_per_s == pytest.approx(480.0)
    assert flow.output_tokens_per_s == pytest.approx(4800.0)
    assert flow.finished_output_tokens_per_s == pytest.approx(4800.0 * (1 - 0.23 / 10), rel=1e-3)
    assert flow.predicted_good_requests_per_s is flow.predicted_output_tokens_per_s is None
    assert flow.good_fraction == 1.0
    assert (verdict.metadata.warmup_s, verdict.metadata.window_s) == (0.0, 10.0)
    assert (found.verdict, found.reasons, found.start_s) == ("met", (), verdict.window.start_s)


def test_failures_are_misses_and_no_latencies() -> None:
    """2.5 % of failed requests miss a p99; the latencies of the others stay as they are."""
    verdict = verdict_on(changed(40, outcome="timeout", chunk_s=(), end_s=40.0))

    assert (verdict.verdict, verdict.exit_code) == ("missed", Exit.NEGATIVE)
    assert "120 of 4800" in verdict.reasons[0]
    assert verdict.outcomes == {"timeout": 120, "ok": 4680}
    assert verdict.throughput.good_fraction == pytest.approx(4680 / 4800)
    assert verdict.throughput.good_requests_per_s == pytest.approx(468.0)
    assert verdict.latency["ttft"].max_s == pytest.approx(0.05)
    assert any("4680 answered requests" in note and "120 with" in note for note in verdict.notes)


@pytest.mark.parametrize(("sent", "verdict"), [(4785, "inconclusive"), (4650, "invalid")])
def test_requests_never_sent_are_misses(sent: int, verdict: str) -> None:
    """What was scheduled and has no sample is a miss; more than 1 % of them prove nothing."""
    run = make_run(GOOD)
    found = judged(replace(run, samples=run.samples[:sent]))

    assert found.outcomes["not_sent"] == 4800 - sent
    assert found.slo[0].num_missed == 4800 - sent
    assert found.verdict == verdict


@pytest.mark.parametrize("stop", ["interrupted", "killed", "orphaned", "out of disk space"])
def test_a_run_cut_short_is_judged_on_what_was_sent(stop: str) -> None:
    """150 of 600 requests were sent, all in time: none is missed, and rates are of their time."""
    whole = make_run([make_sample(k, k / 60) for k in range(600)], stop=stop)
    sent = list(whole.samples[:150])
    # The last was in flight: within its limits so far, if its client could still say so.
    ended = {} if stop == "killed" else {"outcome": "unfinished", "chunk_s": (), "end_s": 2.6}
    sent[-1] = replace(sent[-1], **ended)
    window = replace(whole.job.window, end_s=2.5)  # as `read_run` finds it
    slo = replace(SloSpec(), ttft_s=1.0, tpot_s=0.05, percentile="p50")
    job = replace(whole.job, window=window, slo=slo)
    found = judged(replace(whole, samples=tuple(sent), job=job))
    answered = 150 - bool(ended)

    assert (found.verdict, found.exit_code) == ("interrupted", Exit.INTERRUPTED)
    assert f"{stop} after 150 of 600 requests" in found.reasons[0]
    assert [each.num for each in found.slo] == [answered] * 2
    assert {each.verdict for each in found.slo} == {"met"}
    assert found.throughput.good_fraction == 1.0
    assert found.throughput.offered_requests_per_s == pytest.approx(60, rel=0.02)
    assert "not_sent" not in found.outcomes
    assert any("neither met nor missed" in note for note in found.notes) == bool(ended)
    assert not any("infinitely late" in note for note in found.notes)


@pytest.mark.parametrize(
    ("ttfts", "rising"),
    [
        ([0.3 + 0.4 * k for k in range(60)], True), ([0.1 + 0.001 * k for k in range(100)], True),
        ([0.1] * 50 + [0.1 + 0.1 * k for k in range(50)], True),
        ([0.1 + k % 7 / 100 for k in range(100)], False),
        ([5.0 - 0.04 * k for k in range(100)], False),
    ],
)  # fmt: skip
def test_a_rise_is_seen_in_short_runs(ttfts: list[float], *, rising: bool) -> None:
    """With 160 requests or fewer, too; it is no verdict of its own, unless a limit is missed."""
    found = verdict_on([make_sample(k, k / 50, ttft_s=t) for k, t in enumerate(ttfts)])

    assert (found.window.rising, found.window.settled) == (rising, not rising)
    if rising:
        assert found.verdict in {"missed", "inconclusive"}


def test_a_plain_run_has_the_lengths_of_its_answers() -> None:
    """They make it not invalid; what differs from the plan is said, beside every figure."""
    run = make_run(changed(2, output_tokens=7))
    plain = replace(run.job, plain=True, caveats=("lengths as they came",))
    found = judged(replace(run, job=plain))

    assert judged(run).verdict == "invalid"
    assert found.verdict == "met"
    assert found.metadata.caveats == ("lengths as they came",)
    [note] = [note for note in found.notes if "--plain" in note]
    assert "input as asked for" in note
    assert "8.5 tokens on average, -15.0% against the plan's (10.0; 2400 of 4800" in note


def test_lateness_of_the_client_counts() -> None:
    """TTFT runs from the scheduled arrival, not from the send."""
    latency = verdict_on([make_sample(k, k / 40, lag_s=0.04) for k in range(400)]).latency

    assert latency["ttft"].mean_s == pytest.approx(0.09)
    assert latency["ttft_from_send"].mean_s == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("samples", "client", "verdict", "reason"),
    [
        (GOOD, {"cpu_fraction": 0.95}, "invalid", "95% of its core"),
        (GOOD, {"heartbeat_lag_s": (0.2,) * 100}, "invalid", "of a TTFT"),
        (changed(1, send_s=100.0), {}, "invalid", "of a TTFT"),
        (changed(1, output_tokens=9), {}, "invalid", "ignore_eos"),
        # More than 1 % of the answers of another length than asked, in or out, prove nothing.
        (changed(80, input_tokens=7), {}, "invalid", "another input length"),
        (changed(200, output_tokens=7), {}, "met", ""),
        (changed(1, cached_tokens=16), {}, "invalid", "50% of the prompt tokens"),
        (GOOD, {"stop": "short of a worker"}, "invalid", "short of a worker"),
        (GOOD, {"stop": "interrupted"}, "interrupted", "interrupted"),
        (GOOD, {"stop": "died"}, "failed", "stopped answering"),
        (changed(1, outcome="cut", detail="reset", chunk_s=()), {}, "failed", "no request: reset"),
        (GOOD[:100], {}, "inconclusive", TOO_SHORT),
    ],
)
def test_a_run_that_proves_nothing_says_why(
    samples: list[Sample], client: dict[str, Any], verdict: str, reason: str
) -> None:
    """An unfit client or other work than planned make it invalid, whatever its latencies are."""
    found = verdict_on(samples, **client)

    assert (found.verdict, found.exit_code) == (verdict, VERDICTS[verdict])
    assert not reason or any(reason in why for why in found.reasons)
    assert json.loads(as_json(found))["schema_version"] == 4


def test_a_conversation_may_find_itself_in_the_cache() -> None:
    """What was said before is in the cache by right; what nobody said is not."""
    run = make_run([replace(s, cached_tokens=16 if s.index % 2 else 0) for s in GOOD])
    turns = tuple(
        replace(r, session=k // 2, previous=k - 1 if k % 2 else None, input_tokens=8)
        for k, r in enumerate(run.schedule)
    )
    blocks = tuple(replace(r, content=(1,)) for r in run.schedule)

    assert measurement_window(replace(run, schedule=turns)).counted.cached_fraction == 0.0
    assert measurement_window(replace(run, schedule=blocks)).counted.cached_fraction == 0.0
    assert measurement_window(run).counted.cached_fraction == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("shape", "start_s"),
    [
        (ArrivalShape(), 1.25),
        (ArrivalShape(source=RequestSource(users=3)), 0.0),
        (ArrivalShape(stages=parse_stages("480x10")), 0.0),
    ],
    ids=["open loop", "users", "stages"],
)
def test_what_settles_late_is_cut(shape: ArrivalShape, start_s: float) -> None:
    """A cold start is warm-up, but for loads that do not settle or that wait for answers."""
    run = make_run(COLD)
    verdict = judged(replace(run, job=replace(run.job, shape=shape)))

    assert verdict.verdict == ("missed" if start_s == 0 else "met")
    assert verdict.window.start_s == pytest.approx(start_s, abs=0.05)
    assert verdict.window.settled
    assert ("the warm-up was extended by" in " ".join(verdict.notes)) == (start_s > 0)


@pytest.mark.parametrize(
    "ttfts",
    [[0.1 + k / 2000 for k in range(4800)], [(0.1, 0.1, 0.6, 1.1)[k // 1200] for k in range(4800)]],
    ids=["from the begin", "late"],
)
def test_an_overloaded_target_misses(ttfts: list[float]) -> None:
    """Latencies that rise to the end of the run are no warm-up: more comes than is answered."""
    verdict = verdict_on([make_sample(k, k / 480, ttft_s=t) for k, t in enumerate(ttfts)])

    assert verdict.window.rising
    assert not verdict.window.settled
    assert verdict.verdict == "missed"


def test_prediction_missed() -> None:
    """A missed prediction is a field of the verdict, and exit 3 only where it is required."""
    run = make_run([make_sample(k, k / 480, itl_s=0.04) for k in range(4800)])
    told, required = judged(run), judged(run, require_prediction=True)

    assert not told.comparison.held
    row = told.comparison.row("tpot", "mean")
    assert row.error_fraction == pytest.approx(-0.5)
    assert (told.exit_code, required.exit_code) == (Exit.DONE, Exit.NEGATIVE)
    assert required.verdict == "met"


def test_tolerance_is_read() -> None:
    assert parse_tolerance("0.2") == {"ttft": 0.2, "tpot": 0.2}
    assert parse_tolerance("ttft=0.1,e2e=0.2") == {"ttft": 0.1, "e2e": 0.2}
    for text in ("", "x", "ttft=", "speed=0.1", "-0.1", "ttft=0.1,tpot"):
        with pytest.raises(InputError):
            parse_tolerance(text)


def test_requests_in_flight_follow_littles_law() -> None:
    """Forty requests a second; only what they spend within the window counts."""
    window = Window(start_s=10.0, end_s=20.0, drain_s=5.0)
    samples = [make_sample(k, k / 40) for k in range(1200)]
    foretold = PredictedRequest(
        ttft_s=0.1, tpot_s=0.02, e2e_s=0.5, longest_stall_s=0.02, phases_s={}
    )
    simulated = Resimulation(
        requests=dict.fromkeys(range(1200), foretold), itl={}, busy_fraction={"prefill": 0.2}
    )
    prefill, decode = pool_loads(make_plan(), samples, window, simulated)

    assert prefill.measured_concurrent == pytest.approx(40 * 0.05)
    assert prefill.predicted_concurrent == pytest.approx(40 * 0.1)
    assert decode.measured_concurrent == pytest.approx(40 * 0.18)
    assert decode.predicted_concurrent == pytest.approx(40 * 0.4)
    assert prefill.predicted_utilisation_fraction == 0.2

    # Without a simulation the plan's own load stands beside; a lost request was in prefill.
    lost = [make_sample(k, 10.0, ttft_s=None, outcome="timeout", end_s=30.0) for k in range(3)]
    prefill, decode = pool_loads(make_plan(), lost, window, None)
    assert prefill.measured_concurrent == pytest.approx(3)
    assert decode.measured_concurrent == 0
    assert decode.predicted_utilisation_fraction == 0.6
    assert decode.predicted_concurrent == pytest.approx(40 * 0.18)


LATE = make_sample(30, 3.0, ttft_s=3.0)
LOST = make_sample(30, 3.0, ttft_s=None, outcome="timeout", end_s=33.0)
REFUSED = make_sample(40, 4.0, ttft_s=None, outcome="refused", end_s=24.0)


@pytest.mark.parametrize(
    ("gap_s", "others"),
    [(0.1, [LATE]), (10.0, [replace(LATE, due_s=300.0, send_s=300.0, chunk_s=(305.0,))]),
     (0.1, [LOST, REFUSED])],
    ids=["overtaken", "alone", "lost"],
)  # fmt: skip
def test_a_wait_that_no_queue_explains_is_a_stall(gap_s: float, others: list[Sample]) -> None:
    """A request is suspected that others overtake or that waits alone; a refused one is not."""
    samples = {k: make_sample(k, gap_s * k) for k in range(600)}

    assert find_stalls([*(samples | {s.index: s for s in others}).values()]).indices == (30,)


@pytest.mark.parametrize("blocked_s", [0.0, 1.5, 20.0])
def test_queue_is_no_stall(blocked_s: float) -> None:
    """When everybody waits and leaves in order, however long, it is a queue."""
    samples = [make_sample(index, 0.1 * index) for index in range(1000)]
    for i in range(100, 1000):
        ends_s = max(10.0 + blocked_s + 0.02 * (i - 100), samples[i].due_s + 0.05)
        samples[i] = make_sample(i, 0.1 * i, ttft_s=ends_s - 0.1 * i)

    assert find_stalls(samples).count == 0
    assert find_stalls([]).count == 0


def test_each_class_is_judged_by_its_own_limits() -> None:
    """Summaries are late for the chat's limit and within their own; chat alone is missed."""
    chat = RequestClass(
        name="chat",
        requests_per_s=240.0,
        input_tokens=Lengths.fixed(32),
        output_tokens=Lengths.fixed(10),
    )
    slow = replace(chat, name="summaries", slo=ClassSlo(ttft_s=3.0, e2e_s=4.0))
    samples = [make_sample(k, k / 480, ttft_s=2.0 if k % 2 else 0.05) for k in range(9600)]
    run = make_run(samples)
    slo = SloSpec(ttft_s=1.0, tpot_s=0.05)
    job = replace(
        run.job, workload=WorkloadSpec(requests_per_s=480.0, classes=(chat, slow)), slo=slo
    )
    schedule = tuple(replace(each, class_of=each.index % 2) for each in run.schedule)
    met = judged(replace(run, job=job, schedule=schedule, plan=None))
    swapped = tuple(replace(each, class_of=1 - each.index % 2) for each in run.schedule)
    missed = judged(replace(run, job=job, schedule=swapped, plan=None))

    assert (met.verdict, missed.verdict) == ("met", "missed")
    names = ["chat TTFT p99", "chat TPOT p99"]
    names += [f"summaries {name} p99" for name in ("TTFT", "TPOT", "E2E")]
    assert [each.name for each in met.slo] == names
    assert met.throughput.good_fraction == 1.0
    assert missed.throughput.good_fraction == 0.5
    assert missed.reasons[0].startswith("chat TTFT p99 is 2000.0 ms")


def test_requests_count_in_the_order_of_their_arrival() -> None:
    """The numbers of requests do not matter: the bursts of a percentile are bursts in time."""
    run = make_run([make_sample(99 - k, k / 10) for k in range(100)])
    assert measurement_window(run).indices == tuple(range(99, -1, -1))


def test_an_endpoint_that_says_nothing_of_its_prefix_cache_is_named() -> None:
    """Where answers count cached tokens, or there is none, there is nothing to say."""
    silent = "does not report the hits of its prefix cache"
    assert any(silent in note for note in verdict_on(changed(1, cached_tokens=None)).notes)
    assert not any(silent in note for note in verdict_on(changed(1, cached_tokens=0)).notes)
    cut = changed(1, cached_tokens=None, outcome="cut", detail="reset", chunk_s=())
    assert not any(silent in note for note in verdict_on(cut).notes)
