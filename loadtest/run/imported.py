"""Results of other load generators as a run: `vllm bench`, GuideLLM, AIPerf, inference-perf."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from loadtest.run.client_health import new_client
from loadtest.run.folder import as_json, prepare
from loadtest.run.run_config import RunLength, make_job, planned_load
from loadtest.run.schedule import Window
from minicluster.errors import InputError
from minicluster.plan import read_plan
from minicluster.workload.samples import Sample, to_line
from minicluster.workload.schedule import ScheduledRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

TOOLS = "results of `vllm bench serve`, GuideLLM, AIPerf or inference-perf, request by request"
NS, MS = 1e-9, 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """
    One request as another tool measured it, in seconds of any one clock.

    Attributes:
        start_s: when the tool sent it; no tool says when it was due.
        chunk_s: arrival of each chunk with tokens; empty without an answer.
        chunk_tokens: tokens of each chunk; empty: not known.
        error: what went wrong; empty: nothing.
    """

    start_s: float
    end_s: float
    input_tokens: int
    output_tokens: int
    chunk_s: tuple[float, ...] = ()
    chunk_tokens: tuple[int, ...] = ()
    error: str = ""


def import_run(results: Path, plan: Path, folder: Path, *, benchmark: int | None) -> None:
    """
    Write the folder of a run from the results of another load generator.

    All requests count as measured. TTFT and the end-to-end latency begin with the send, because
    no other tool keeps the scheduled arrival; where a tool keeps no time of each token, the tokens
    after the first are spread evenly, so that TPOT is right and gaps are means.

    Args:
        results: of the tool; recognised by what is in it.
        plan: that the endpoint was deployed from: its load and SLO are those of the run.
        benchmark: of a GuideLLM file with several, from 1.

    Raises:
        InputError: a file of no such tool, one without single requests, holes or contradictions
            in it, or a folder that cannot be written.
    """
    answers = sorted(read_answers(results, benchmark=benchmark), key=lambda each: each.start_s)
    if len(answers) < 2:  # noqa: PLR2004  (one request has no rate)
        raise InputError(str(results), f"{len(answers)} requests", "two requests or more")
    first_s = answers[0].start_s
    schedule = tuple(
        ScheduledRequest(
            index=at, due_s=each.start_s - first_s, in_window=True,
            input_tokens=max(1, each.input_tokens), output_tokens=max(1, each.output_tokens),
        )
        for at, each in enumerate(answers)
    )  # fmt: skip
    last_s = schedule[-1].due_s
    length = RunLength(num_requests=len(answers), warmup_s=0.0)
    job = make_job(planned_load(read_plan(plan)), length, host=f"imported from {results.name}")
    end_s = last_s * (1 + 1 / (len(answers) - 1)) or 1.0
    job = replace(job, window=Window(start_s=0.0, end_s=end_s, drain_s=0.0))
    prepare(folder, job, schedule, plan)
    lines = (to_line(_sample(at, each, first_s)) for at, each in enumerate(answers))
    (folder / "samples.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    client = new_client("complete", started_unix_s=first_s, origin_monotonic_s=0.0)
    wall_s = max(each.end_s for each in answers) - first_s
    told = replace(client, wall_s=wall_s, machine=f"not known: {results.name}", versions={})
    (folder / "client.json").write_text(as_json(told), encoding="utf-8")


def _sample(index: int, answer: Answer, first_s: float) -> Sample:
    send_s = answer.start_s - first_s
    return Sample(
        index=index,
        in_window=True,
        due_s=send_s,
        send_s=send_s,
        end_s=answer.end_s - first_s,
        asked_input_tokens=max(1, answer.input_tokens),
        asked_output_tokens=max(1, answer.output_tokens),
        input_tokens=answer.input_tokens,
        output_tokens=answer.output_tokens,
        chunk_s=tuple(each - first_s for each in answer.chunk_s),
        chunk_tokens=answer.chunk_tokens,
        outcome="server_error" if answer.error else "ok",
        detail=answer.error[:200] or None,
    )


def read_answers(path: Path, *, benchmark: int | None = None) -> list[Answer]:
    """Read the requests of a file; raises as `import_run`."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(str(path), str(error), TOOLS) from None
    raw = _parsed(text, str(path))
    for known, read in READERS.values():
        if known(raw):
            try:
                return list(_checked(read(raw, str(path), benchmark), str(path)))
            except (KeyError, TypeError, IndexError, ValueError) as error:
                expected = "the fields of its tool (docs/stacks.md)"
                raise InputError(str(path), f"{type(error).__name__}: {error}", expected) from None
    raise InputError(str(path), "another format", TOOLS)


def _parsed(text: str, place: str) -> Any:  # noqa: ANN401  (a document of another tool)
    """Return a JSON document, or the list of those on the lines of a file."""
    try:
        return json.loads(text)
    except ValueError:
        pass
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            found += [json.loads(line)] if line.strip() else []
        except ValueError as error:
            raise InputError(f"{place}:{number}", str(error), f"JSON: {TOOLS}") from None
    return found


def _checked(answers: Iterator[Answer], place: str) -> Iterator[Answer]:
    """Refuse answers that contradict themselves, by the number of their request."""
    for number, each in enumerate(answers, start=1):
        where = f"{place}: request {number}"
        times = (each.start_s, *each.chunk_s)
        if any(after < before for before, after in pairwise(times)):
            raise InputError(where, f"{times[:4]} s", "times that rise from the send on")
        if not each.error and not (each.chunk_s and each.output_tokens > 0):
            expected = "a first token and a count of output tokens, or an error"
            raise InputError(where, f"{each.output_tokens} output tokens", expected)
        if each.chunk_tokens and sum(each.chunk_tokens) != each.output_tokens:
            raise InputError(
                where, sum(each.chunk_tokens), f"{each.output_tokens} tokens in chunks"
            )
        yield each


def _spread(first_s: float, last_s: float, tokens: int) -> tuple[float, ...]:
    """Return the arrivals of tokens of which the first and the last are known."""
    step_s = (last_s - first_s) / max(1, tokens - 1)
    return (first_s, *(first_s + at * step_s for at in range(1, tokens)))


# --- tools


def _vllm(raw: dict[str, Any], place: str, _: int | None) -> Iterator[Answer]:
    """
    `vllm bench serve`: seconds; ITLs are the gaps between chunks.

    Source: vLLM 0.29.0, vllm/benchmarks/serve.py, `result` of `benchmark`.
    """
    names = ("start_times", "ttfts", "itls", "input_lens", "output_lens", "errors")
    absent = [name for name in names if name not in raw]
    if absent:
        option = "run it with --save-result --save-detailed"
        raise InputError(place, f"no {', '.join(absent)}", "lists with a value a request", option)
    columns = (raw[name] for name in names)
    for start_s, ttft_s, gaps_s, prompt, output, error in zip(*columns, strict=True):
        chunk_s = tuple(accumulate(gaps_s, initial=start_s + ttft_s)) if not error else ()
        yield Answer(
            start_s=start_s,
            end_s=chunk_s[-1] if chunk_s else start_s,
            input_tokens=prompt,
            output_tokens=output or 0,
            chunk_s=chunk_s,
            chunk_tokens=(1,) * len(chunk_s) if len(chunk_s) == output else (),
            error=str(error or ""),
        )


def _guidellm(raw: dict[str, Any], place: str, benchmark: int | None) -> Iterator[Answer]:
    """
    GuideLLM: unix seconds of first and last token.

    Its `time_per_output_token_ms` contains the TTFT, and is not read.

    Source: vllm-project/guidellm, schemas/request_stats.py and info.py, 2026-09.
    """
    found = raw["benchmarks"]
    if len(found) != 1 and benchmark is None:
        expected = "one benchmark, or --benchmark with the number of one"
        raise InputError(place, f"{len(found)} benchmarks", expected)
    if not 1 <= (benchmark or 1) <= len(found):
        raise InputError("--benchmark", benchmark, f"from 1 to {len(found)}")
    requests = found[(benchmark or 1) - 1]["requests"]
    for kind in ("successful", "errored", "incomplete"):
        for each in requests.get(kind) or ():
            times = each["info"]["timings"]
            tokens = int(each.get("output_tokens") or 0)
            start_s = each["request_start_time"]
            ended = kind == "successful"
            first_s, last_s = times["first_token_iteration"], times["last_token_iteration"]
            yield Answer(
                start_s=start_s,
                end_s=each["request_end_time"],
                input_tokens=int(each.get("prompt_tokens") or 0),
                output_tokens=tokens,
                chunk_s=_spread(first_s, last_s, tokens) if ended else (),
                error="" if ended else each["info"].get("error") or kind,
            )


def _aiperf(raw: list[dict[str, Any]], _place: str, _: int | None) -> Iterator[Answer]:
    """
    AIPerf: values with units, of each request of the profiling phase.

    Source: ai-dynamo/aiperf, docs/tutorials/working-with-profile-exports.md, 2026-09.
    """
    for each in raw:
        told, metrics, error = each["metadata"], each["metrics"] or {}, each.get("error")
        if told.get("benchmark_phase", "profiling") != "profiling":
            continue
        start_s, end_s = told["request_start_ns"] * NS, told["request_end_ns"] * NS
        if error:
            prompt = int(metrics.get("error_isl", {}).get("value", 0))
            said = f"{error.get('code')} {error.get('type')}: {error.get('message')}"
            yield Answer(
                start_s=start_s, end_s=end_s, input_tokens=prompt, output_tokens=0, error=said
            )
            continue
        output = int(metrics["output_sequence_length"]["value"])
        first_s = start_s + _seconds(metrics["time_to_first_token"])
        chunk_s = _spread(first_s, start_s + _seconds(metrics["request_latency"]), output)
        yield Answer(
            start_s=start_s,
            end_s=end_s,
            input_tokens=int(metrics["input_sequence_length"]["value"]),
            output_tokens=output,
            chunk_s=chunk_s,
        )


def _seconds(metric: dict[str, Any]) -> float:
    return (
        float(metric["value"])
        * {"ns": NS, "us": 1e-6, "ms": MS, "s": 1.0, "sec": 1.0}[metric["unit"]]
    )


def _inference_perf(raw: list[dict[str, Any]], _place: str, _: int | None) -> Iterator[Answer]:
    """
    inference-perf: seconds of every token.

    Source: kubernetes-sigs/inference-perf, reportgen, `per_request_lifecycle_metrics`, 2026-08.
    """
    for each in raw:
        info, error = each["info"] or {}, each.get("error")
        times = () if error else tuple(info["output_token_times"])
        yield Answer(
            start_s=each["start_time"],
            end_s=each["end_time"],
            input_tokens=int(info.get("input_tokens") or 0),
            output_tokens=int(info.get("output_tokens") or 0),
            chunk_s=times,
            error=str(error.get("error_type", error) if isinstance(error, dict) else error or ""),
        )


def _is_list_of(*keys: str) -> Callable[[Any], bool]:
    def known(raw: object) -> bool:
        first: Sequence[Any] = raw if isinstance(raw, list) else ()
        return bool(first) and isinstance(first[0], dict) and all(key in first[0] for key in keys)

    return known


Reader = tuple["Callable[[Any], bool]", "Callable[[Any, str, int | None], Iterator[Answer]]"]

READERS: dict[str, Reader] = {
    "vllm bench serve": (lambda raw: isinstance(raw, dict) and "request_throughput" in raw, _vllm),
    "GuideLLM": (lambda raw: isinstance(raw, dict) and "benchmarks" in raw, _guidellm),
    "AIPerf": (_is_list_of("metadata", "metrics"), _aiperf),
    "inference-perf": (_is_list_of("start_time", "info"), _inference_perf),
}
"""How the results of each tool are recognised, and read."""
