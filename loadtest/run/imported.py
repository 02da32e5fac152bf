"""Results of other load generators as a run: `vllm bench`, GuideLLM, AIPerf, inference-perf."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from loadtest.run.client_health import new_client
from loadtest.run.folder import as_json, prepare
from loadtest.run.run_config import RunLength, make_job, planned_load
from loadtest.run.schedule import Window
from minicluster.errors import Fault, InputError
from minicluster.files import read_text, write_together
from minicluster.plan import read_plan
from minicluster.workload.samples import Sample, to_line
from minicluster.workload.schedule import ScheduledRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

TOOLS = "results of `vllm bench serve`, GuideLLM, AIPerf or inference-perf, request by request"
LISTS = "a file of lists with a value for each request"
NS = 1e-9
MOST_TOKENS = 10_000_000
"""No answer has more: a file that says so is broken, and would fill the memory."""
SHED = re.compile(r"\b(429|503)\b")
"""Statuses with which a server sheds a request, in texts of errors."""
SCHEDULED = ("constant", "poisson", "trace")
"""GuideLLM's strategies with a schedule of arrivals; the others send as places get free."""
UNIX_S = 1e9
"""Clocks that are beyond it count from 1970; others from the start of the tool's machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolRequest:
    """
    One request as another tool measured it, in seconds of any one clock.

    Attributes:
        due_s: when it was to be sent, else when it was.
        input_tokens: what the server counted, else the tool; `None`: not known.
        chunk_s: arrival of each chunk with tokens; empty without an answer.
        outcome: of `minicluster.workload.samples.OUTCOMES`; `detail` says what went wrong.
    """

    due_s: float
    start_s: float
    end_s: float
    input_tokens: int | None
    output_tokens: int = 0
    chunk_s: tuple[float, ...] = ()
    outcome: str = "ok"
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pacing:
    """
    What a file says of the requests in flight, and of when they were due.

    Attributes:
        most: largest number that the tool let be in flight; `None`: any, or not said.
        told: whether the file says it; *due*: whether it says when each request was due.
        closed: whether none was due before it had a place, as of users who wait for their answers.
    """

    most: int | None = None
    told: bool = True
    due: bool = False
    closed: bool = False

    def said(self, tool: str, answers: Sequence[ToolRequest]) -> tuple[tuple[str, ...], str]:
        """Return what stands beside the figures, and the remark that explains it."""
        peak = most_in_flight(answers)
        seen = f"at most {peak} were in flight at once"
        left_out = "waits in the client are in no figure"
        if not self.told:
            unknown = f"the file of {tool} does not say whether it capped requests in flight"
            return (), f"{unknown}: {seen}, and if there was a cap, {left_out}"
        if self.most is None:
            return (), ""
        cap = f"at most {self.most} in flight"
        if self.closed:
            why = f"{tool} kept {cap} (closed loop): none was due before it had a place"
            return (f"{cap} (closed loop)",), why
        if peak < self.most:
            return (), f"{tool} would have kept {cap}, and {seen}: the cap changed nothing"
        capped = f"{tool} kept {cap}, so that the endpoint had less load than arrived"
        if self.due:
            why = f"{capped}; TTFT and E2E begin when a request was due, its wait included; a"
            why += " prediction is of the load that arrived"
            return (f"{cap} (waits in the client included)",), why
        why = f"{capped}, and the file does not say when requests were due: TTFT and E2E begin"
        why += f" with the send, and {left_out}, so that they flatter the endpoint"
        return (f"{cap} (waits in the client not included)",), why


def most_in_flight(answers: Sequence[ToolRequest]) -> int:
    """Return the largest number of requests that were in flight at once."""
    ends = sorted((at_s, step) for a in answers for at_s, step in ((a.start_s, 1), (a.end_s, -1)))
    return max(accumulate(step for _, step in ends), default=0)


def import_run(results: Path, plan: Path, folder: Path, *, benchmark: int | None) -> None:
    """
    Write the folder of a run from the results of another load generator, told by what is in them.

    All requests count, but those that the tool cut off when it ended. TTFT begins with the send
    where the tool does not keep when a request was due; whether it capped the requests in flight
    is a remark of the run, and stands beside its figures. Where it keeps no time of each chunk, the
    tokens after the first are spread evenly, so that TPOT is right and gaps are means.

    Args:
        plan: that the endpoint was deployed from: its load and SLO are those of the run.
        benchmark: of a GuideLLM file with several, from 1.

    Raises InputError: holes or contradictions in the file, or a folder that cannot be written.
    """
    tool, found, pacing = _read(results, benchmark)
    answers = sorted(found, key=lambda request: request.due_s)
    counted = sum(request.outcome != "unfinished" for request in answers)
    if counted < 2:  # noqa: PLR2004  (one request has no rate)
        raise InputError(
            str(results), Fault(f"has only {counted} requests"), "a run of two requests or more"
        )
    first_s = answers[0].due_s
    samples = [_sample(at, each, first_s) for at, each in enumerate(answers)]
    schedule = tuple(
        ScheduledRequest(
            index=sample.index, due_s=sample.due_s, in_window=sample.in_window,
            input_tokens=sample.asked_input_tokens, output_tokens=sample.asked_output_tokens,
        )
        for sample in samples
    )  # fmt: skip
    last_s = schedule[-1].due_s
    length = RunLength(num_requests=counted, warmup_s=0.0)
    job = make_job(planned_load(read_plan(plan)), length, host=f"imported from {results.name}")
    end_s = last_s * (1 + 1 / (len(answers) - 1)) or 1.0
    caveats, remark = pacing.said(tool, answers)
    job = replace(
        job, window=Window(start_s=0.0, end_s=end_s, drain_s=0.0), caveats=caveats,
        remarks=(remark,) if remark else (), queued_in_client=bool(caveats),
    )  # fmt: skip
    prepare(folder, job, schedule, plan)
    unix_s = first_s if first_s > UNIX_S else 0.0
    client = new_client("complete", started_unix_s=unix_s, origin_monotonic_s=0.0)
    wall_s = max(sample.end_s for sample in samples)
    report = replace(client, wall_s=wall_s, machine="not known: imported", versions={})
    lines = "".join(f"{to_line(sample)}\n" for sample in samples)
    write_together({folder / "samples.jsonl": lines, folder / "client.json": as_json(report)})


def _sample(index: int, answer: ToolRequest, first_s: float) -> Sample:
    return Sample(
        index=index,
        in_window=answer.outcome != "unfinished",
        due_s=answer.due_s - first_s,
        send_s=answer.start_s - first_s,
        end_s=answer.end_s - first_s,
        asked_input_tokens=max(1, answer.input_tokens or 0),
        asked_output_tokens=max(1, answer.output_tokens),
        input_tokens=answer.input_tokens,
        output_tokens=answer.output_tokens,
        chunk_s=tuple(arrival_s - first_s for arrival_s in answer.chunk_s),
        chunk_tokens=(1,) * len(answer.chunk_s) if _singly(answer) else (),
        outcome=answer.outcome,
        detail=answer.detail[:200] or None,
    )


def _singly(answer: ToolRequest) -> bool:
    return len(answer.chunk_s) == answer.output_tokens


def read_answers(path: Path, *, benchmark: int | None = None) -> list[ToolRequest]:
    """Read the requests of a file; raises as `import_run`."""
    return _read(path, benchmark)[1]


def _read(path: Path, benchmark: int | None) -> tuple[str, list[ToolRequest], Pacing]:
    raw, place = _parsed(read_text(path, TOOLS), str(path)), str(path)
    for is_summary, way_out in SUMMARIES:
        if is_summary(raw):
            raise InputError(
                place, Fault("is a summary"), "the results request by request", way_out
            )
    for tool, (known, read, pacing) in READERS.items():
        if known(raw):
            try:
                answers = list(_checked(read(raw, place, benchmark), place))
                return tool, answers, pacing(raw, benchmark)
            except (LookupError, TypeError, ArithmeticError, ValueError, AttributeError) as error:
                expected = (
                    "a file with the fields of its tool and streamed answers (docs/stacks.md)"
                )
                raise InputError(
                    place, Fault(f"cannot be read: {type(error).__name__}: {error}"), expected
                ) from None
    raise InputError(place, Fault("is in another format"), TOOLS)


def _parsed(text: str, place: str) -> Any:  # noqa: ANN401  (a document of another tool)
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    documents = []
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            documents += [json.loads(line)] if line.strip() else []
        except (ValueError, RecursionError) as error:
            raise InputError(
                f"{place}:{number}", Fault(f"is not JSON: {error}"), f"JSON: {TOOLS}"
            ) from None
    return documents


def _checked(answers: Iterator[ToolRequest], place: str) -> Iterator[ToolRequest]:
    """Refuse answers that contradict themselves, by the number of their request."""
    for number, each in enumerate(answers, start=1):
        where = f"{place}: request {number}"
        times = (each.due_s, each.start_s, *each.chunk_s)
        rising = all(before <= after for before, after in pairwise(times))
        if not (rising and all(map(math.isfinite, (*times, each.end_s)))):
            expected = "a request whose times are finite and rise from the send on"
            raise InputError(where, Fault(f"has the times {times[:4]} s"), expected)
        if each.outcome == "ok" and not (each.chunk_s and each.output_tokens > 0):
            expected = "an answer with a first token and a count of output tokens, or an error"
            raise InputError(where, Fault(f"has {each.output_tokens} output tokens"), expected)
        if each.outcome == "ok" and not each.input_tokens:
            raise InputError(
                f"{where}: input tokens", each.input_tokens, "a count of prompt tokens"
            )
        yield each


def _spread(first_s: float, last_s: float, tokens: int) -> tuple[float, ...]:
    """Return the arrivals of tokens of which the first and the last are known."""
    if tokens > MOST_TOKENS:
        raise ValueError(f"{tokens} tokens in an answer")
    step_s = (last_s - first_s) / max(1, tokens - 1)
    return (first_s, *(first_s + at * step_s for at in range(1, tokens)))


def _failed(
    start_s: float, end_s: float, text: object, *, due_s: float | None = None,
    tokens: int | None = None,
) -> ToolRequest:  # fmt: skip
    """Return a request without an answer: shed by the server, or an error of it."""
    reason = str(text) or "no tokens"
    outcome = "shed" if SHED.search(reason) else "server_error"
    due = start_s if due_s is None else due_s
    return ToolRequest(
        due_s=due, start_s=start_s, end_s=end_s, input_tokens=tokens, outcome=outcome, detail=reason
    )


# --- tools


def _vllm(raw: dict[str, Any], place: str, _: int | None) -> Iterator[ToolRequest]:
    """
    `vllm bench serve`: seconds; ITLs are the gaps between chunks. Errors have no status.

    `queue_times` (from 0.33 on) is the wait of a request that had arrived, for a place under
    `max_concurrency`; at the rate `inf` all arrive at once, and it is no wait of anybody.

    Source: vLLM 0.29.0, vllm/benchmarks/serve.py, `result` of `benchmark`, and a run of it; of
    `queue_times` its main branch, commit 009e6d4a.
    """
    names = ["start_times", "ttfts", "itls", "input_lens", "output_lens", "errors"]
    absent = [name for name in names if name not in raw]
    if absent:
        way_out = "run it with --save-result --save-detailed"
        raise InputError(place, Fault(f"has no {', '.join(absent)}"), LISTS, way_out)
    closed = _vllm_pacing(raw, None).closed
    waits_s = [0.0] * len(raw["start_times"]) if closed else raw.get("queue_times")
    if waits_s is not None:
        names.append("queue_times")
        raw = {**raw, "queue_times": waits_s}
    counts = {name: len(raw[name]) for name in names}
    if len(set(counts.values())) > 1:
        raise InputError(
            place,
            Fault(f"has lists of several lengths, {json.dumps(counts)}"),
            LISTS,
            "run the benchmark again",
        )
    for start_s, ttft_s, gaps_s, prompt, output, error, *wait_s in zip(
        *(raw[name] for name in names), strict=True
    ):
        due_s = start_s - sum(wait_s)
        if error or not output:
            yield _failed(start_s, start_s, error, due_s=due_s, tokens=prompt)
            continue
        chunk_s = tuple(accumulate(gaps_s, initial=start_s + ttft_s))
        yield ToolRequest(
            due_s=due_s, start_s=start_s, end_s=chunk_s[-1], input_tokens=prompt,
            output_tokens=output, chunk_s=chunk_s,
        )  # fmt: skip


def _vllm_pacing(raw: dict[str, Any], _: int | None) -> Pacing:
    most, rate = raw.get("max_concurrency"), raw.get("request_rate")
    return Pacing(
        most=_count(most), told="max_concurrency" in raw, due="queue_times" in raw,
        closed=most is not None and rate in {"inf", math.inf},
    )  # fmt: skip


def _count(most: object) -> int | None:
    if most is not None and not (isinstance(most, int) and most > 0):
        raise ValueError(f"{most!r} requests in flight at most")
    return most


def _guidellm(raw: dict[str, Any], place: str, benchmark: int | None) -> Iterator[ToolRequest]:
    """
    GuideLLM: unix seconds of first and last token.

    Its `time_per_output_token_ms` contains the TTFT, and is not read. A request was due at its
    `targeted_start`, if its strategy has a schedule and the time has the origin of the others,
    which it has not in all runs of 0.8.1.

    Source: GuideLLM 0.8.1, schemas/base/request_stats.py and info.py, scheduler/strategies.py, and
    a run of it.
    """
    chosen = _chosen(raw, place, benchmark)
    scheduled = _strategy(chosen).get("type_") in SCHEDULED
    for kind in ("successful", "errored", "incomplete"):
        kept, total = chosen["requests"].get(kind) or (), chosen["metrics"]["request_totals"][kind]
        if len(kept) != total:
            way_out = "run it without a sample size of requests"
            fault = Fault(f"has only {len(kept):,} {kind} requests")
            raise InputError(place, fault, f"a file of all {total:,}", way_out)
        for request in kept:
            if kind != "incomplete" or request["request_start_time"] is not None:
                yield _guidellm_request(request, kind, scheduled=scheduled)


def _chosen(raw: dict[str, Any], place: str, benchmark: int | None) -> dict[str, Any]:
    benchmarks = raw["benchmarks"]
    if len(benchmarks) != 1 and benchmark is None:
        expected = "a file of one benchmark, or beside --benchmark with the number of one"
        raise InputError(place, Fault(f"has {len(benchmarks)} benchmarks"), expected)
    if not 1 <= (benchmark or 1) <= len(benchmarks):
        raise InputError("--benchmark", benchmark, f"from 1 to {len(benchmarks)}")
    chosen: dict[str, Any] = benchmarks[(benchmark or 1) - 1]
    return chosen


def _strategy(chosen: dict[str, Any]) -> dict[str, Any]:
    return (chosen.get("config") or {}).get("strategy") or {}


def _guidellm_pacing(raw: dict[str, Any], benchmark: int | None) -> Pacing:
    chosen = raw["benchmarks"][(benchmark or 1) - 1]
    strategy = _strategy(chosen)
    kind, kept = strategy.get("type_"), chosen["requests"].get("successful") or ()
    if kind is None:
        return Pacing(told=False)
    most = 1 if kind == "synchronous" else strategy.get("streams", strategy.get("max_concurrency"))
    return Pacing(
        most=_count(most), closed=kind not in SCHEDULED,
        due=kind in SCHEDULED and all(_targeted_s(request) is not None for request in kept),
    )  # fmt: skip


def _targeted_s(each: dict[str, Any]) -> float | None:
    """Return when a request was to be sent, on the clock of its other times; `None`: not told."""
    at_s: float | None = each["info"]["timings"].get("targeted_start")
    return at_s if at_s is not None and UNIX_S < at_s <= each["request_start_time"] else None


def _guidellm_request(each: dict[str, Any], kind: str, *, scheduled: bool) -> ToolRequest:
    start_s, end_s = each["request_start_time"], each["request_end_time"]
    due_s = (_targeted_s(each) if scheduled else None) or start_s
    prompt, output = each.get("prompt_tokens"), each.get("output_tokens") or 0
    if kind != "successful":
        reason = each["info"].get("error") or kind
        failed = _failed(start_s, end_s, reason, due_s=due_s, tokens=prompt)
        return failed if kind == "errored" else replace(failed, outcome="unfinished")
    times = each["info"]["timings"]
    chunk_s = _spread(times["first_token_iteration"], times["last_token_iteration"], output)
    return ToolRequest(
        due_s=due_s, start_s=start_s, end_s=end_s, input_tokens=prompt, output_tokens=output,
        chunk_s=chunk_s,
    )  # fmt: skip


def _aiperf(raw: list[dict[str, Any]], _place: str, _: int | None) -> Iterator[ToolRequest]:
    """
    AIPerf: values with units, of each request of the profiling phase.

    Tokens are those that the server's usage counts: AIPerf's own come from tokenising the text.
    `credit_issued_ns` comes after the wait for a place under `--concurrency`, of which this file
    says nothing (credit/issuer.py).

    Source: AIPerf 0.13.0, docs/tutorials/working-with-profile-exports.md, and a run of it.
    """
    for record in raw:
        told, metrics, error = record["metadata"], record["metrics"] or {}, record.get("error")
        if told.get("benchmark_phase", "profiling") != "profiling":
            continue
        start_s, end_s = told["request_start_ns"] * NS, told["request_end_ns"] * NS
        due_s = told.get("credit_issued_ns", told["request_start_ns"]) * NS
        if error:
            reason = f"{error.get('code')} {error.get('type')}: {error.get('message')}"
            tokens = metrics.get("error_isl", {}).get("value")
            failed = _failed(start_s, end_s, reason, due_s=due_s, tokens=tokens)
            yield replace(failed, outcome="unfinished") if told.get("was_cancelled") else failed
            continue
        first_s = start_s + _seconds(metrics["time_to_first_token"])
        prompt = metrics.get("usage_prompt_tokens", metrics["input_sequence_length"])["value"]
        output = metrics.get("usage_completion_tokens", metrics["output_sequence_length"])["value"]
        gaps = metrics.get("inter_chunk_latency")
        chunk_s = (
            tuple(accumulate(_all_seconds(gaps), initial=first_s))
            if gaps
            else _spread(first_s, start_s + _seconds(metrics["request_latency"]), int(output))
        )
        yield ToolRequest(
            due_s=due_s, start_s=start_s, end_s=end_s, input_tokens=int(prompt),
            output_tokens=int(output), chunk_s=chunk_s,
        )  # fmt: skip


def _seconds(metric: dict[str, Any]) -> float:
    return _all_seconds({**metric, "value": [metric["value"]]})[0]


def _all_seconds(metric: dict[str, Any]) -> list[float]:
    unit_s = {"ns": NS, "us": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0}[metric["unit"]]
    return [float(number) * unit_s for number in metric["value"]]


def _inference_perf(raw: list[dict[str, Any]], _place: str, _: int | None) -> Iterator[ToolRequest]:
    """
    inference-perf: seconds of every chunk.

    Tokens are those that the server's usage counts, where it did: inference-perf's own come from
    tokenising the text. It keeps `scheduled_time` and `worker_max_concurrency` out of this file
    (reportgen/base.py, `build_per_request_lifecycle_entry`).

    Source: inference-perf 0.5.0 (`response_info`) and 0.7.0 (`response_metrics`), apis/base.py,
    and a run of 0.7.0.
    """
    for record in raw:
        info, error = record["info"] or {}, record.get("error")
        start_s, end_s, prompt = record["start_time"], record["end_time"], info.get("input_tokens")
        if error:
            said = f"{error['error_type']}: {error['error_msg']}"
            yield _failed(start_s, end_s, said, tokens=prompt)
            continue
        response = info.get("response_metrics") or info["response_info"]
        usage = response.get("server_usage") or {}
        yield ToolRequest(
            due_s=start_s, start_s=start_s, end_s=end_s,
            input_tokens=usage.get("prompt_tokens", prompt),
            output_tokens=usage.get("completion_tokens", response["output_tokens"]),
            chunk_s=tuple(response["chunk_times"]),
        )  # fmt: skip


def _untold(*_: object) -> Pacing:
    return Pacing(told=False)


def _is_list_of(*keys: str) -> Callable[[Any], bool]:
    def known(raw: object) -> bool:
        first: Sequence[Any] = raw if isinstance(raw, list) else ()
        return bool(first) and isinstance(first[0], dict) and all(key in first[0] for key in keys)

    return known


def _is_dict_with(*keys: str) -> Callable[[Any], bool]:
    return lambda raw: isinstance(raw, dict) and all(key in raw for key in keys)


Reader = tuple[
    "Callable[[Any], bool]",
    "Callable[[Any, str, int | None], Iterator[ToolRequest]]",
    "Callable[[Any, int | None], Pacing]",
]

SUMMARIES = (
    (_is_dict_with("aiperf_version", "request_throughput"), "import profile_export.jsonl"),
    (
        _is_dict_with("load_summary", "successes"),
        "import per_request_lifecycle_metrics.json: report.request_lifecycle.per_request: true",
    ),
)
"""How summaries of tools are recognised, and where the single requests are."""

READERS: dict[str, Reader] = {
    "vllm bench serve": (_is_dict_with("request_throughput", "num_prompts"), _vllm, _vllm_pacing),
    "GuideLLM": (_is_dict_with("benchmarks"), _guidellm, _guidellm_pacing),
    "AIPerf": (_is_list_of("metadata", "metrics"), _aiperf, _untold),
    "inference-perf": (_is_list_of("start_time", "info"), _inference_perf, _untold),
}
"""How the results of each tool are recognised and read, and how their requests were paced."""
