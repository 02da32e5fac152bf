"""What logs and traces of others say: units, rows that are no plain requests, spans; or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minicluster.errors import InputError
from minicluster.workload.schedule import write_schedule
from minicluster.workload.trace_options import TraceReading
from minicluster.workload.traces import read_trace

EPOCH_S = 1_767_225_600  # 2026-01-01
DATES = [f"2026-01-01T00:00:0{n}Z" for n in range(6)]
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:x"}},
                                      {"type": "text", "text": "What is it?"}]}]  # fmt: skip


def lines(*records: dict[str, Any]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def logged(times: list[Any], key: str = "time", **more: Any) -> str:  # noqa: ANN401  (JSON)
    return lines(*({key: at, "prompt_tokens": 500, "output_tokens": 60} | more for at in times))


def mooncake(step: float, block: int | None, count: int = 8, **more: Any) -> str:  # noqa: ANN401
    """Prompts of 1,100 tokens, *step* apart, with as many ids as blocks of that size need."""
    ids = {} if block is None else {"hash_ids": list(range(-(-1100 // block)))}
    rows = ({"timestamp": step * n, "input_length": 1100, "output_length": 9} for n in range(count))
    return lines(*(row | ids | more for row in rows))


def spans(*each: tuple[str, str, int, int | None], scope: str = "a") -> str:
    """Return OTLP of spans of one trace: id, parent's id, begin in seconds, prompt tokens."""
    found = [
        {
            "traceId": "t",
            "spanId": own,
            "parentSpanId": above,
            "startTimeUnixNano": str((EPOCH_S + begin) * 10**9),
            "endTimeUnixNano": str((EPOCH_S + 9) * 10**9),
            "attributes": []
            if tokens is None
            else [
                {"key": "gen_ai.usage.input_tokens", "value": {"intValue": str(tokens)}},
                {"key": "gen_ai.usage.completion_tokens", "value": {"doubleValue": 60}},
            ],
        }
        for own, above, begin, tokens in each
    ]
    return json.dumps(
        {"resourceSpans": [{"scopeSpans": [{"scope": {"name": scope}, "spans": found}]}]}
    )


CHAT: dict[str, Any] = {"chat_id": 1, "parent_chat_id": -1, "type": "text", "turn": 1}
BURST3 = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
)
CONSOLE = [
    {
        "name": "llm_request",
        "context": {"trace_id": "0x1", "span_id": f"0x{n}"},
        "parent_id": None,
        "start_time": f"2026-01-01T00:00:0{n}.000000Z",
        "attributes": {"gen_ai.usage.prompt_tokens": 500, "gen_ai.usage.completion_tokens": 60},
    }
    for n in range(3)
]
JAEGER = {
    "data": [
        {
            "traceID": "t",
            "spans": [
                {
                    "traceID": "t",
                    "spanID": f"s{n}",
                    "references": [{"refType": "CHILD_OF", "traceID": "t", "spanID": "root"}],
                    "startTime": (EPOCH_S + n) * 10**6,
                    "tags": [
                        {"key": "gen_ai.usage.prompt_tokens", "type": "int64", "value": 500},
                        {"key": "gen_ai.usage.completion_tokens", "type": "int64", "value": 60},
                    ],
                }
                for n in range(3)
            ],
        }
    ]
}
LANGFUSE = [
    {"id": f"o{n}", "type": "GENERATION", "startTime": f"2026-01-01T00:00:0{n}.000Z",
     "endTime": "2026-01-01T01:00:00.000Z", "usage": {"input": 500, "output": 60, "total": 560}}
    for n in range(3)
]  # fmt: skip
LITELLM = lines(
    *(
        {"request_id": n, "startTime": f"2026-01-01 00:00:0{n}+00:00", "prompt_tokens": "500",
         "completion_tokens": "60", "total_tokens": "560", "spend": 0.1}
        for n in range(3)
    )
)  # fmt: skip
OPENAI = lines(
    *(
        {"id": "chatcmpl", "created": EPOCH_S + n, "choices": [{"index": 0}],
         "usage": {"prompt_tokens": 500, "completion_tokens": 60,
                   "prompt_tokens_details": {"cached_tokens": 128, "audio_tokens": 0}}}
        for n in range(3)
    )
)  # fmt: skip
DYNAMO = lines(
    *(
        {"schema": "dynamo.request.trace.v1", "event_time_unix_ms": (EPOCH_S + 9) * 1000,
         "request": {"request_received_ms": (EPOCH_S + n) * 1000, "input_tokens": 500,
                     "output_tokens": 60, "cached_tokens": 0}}
        for n in range(3)
    )
)  # fmt: skip


def nested(id_key: str, parent_key: str, none: str | None) -> str:
    """Return records of a tracer: of two calls, each by a gateway and by an engine below it."""
    return lines(
        *(
            {"traceId": "t", id_key: f"{n}x", parent_key: none if n % 2 == 0 else f"{n - 1}x",
             "start_time": DATES[n], "prompt_tokens": 500, "output_tokens": 60}
            for n in range(4)
        )
    )  # fmt: skip


READ = {
    "Zipkin": (nested("id", "parentId", None), 0.5, "dates"),
    "Langfuse's calls in calls": (nested("id", "parentObservationId", None), 0.5, "dates"),
    "LangSmith": (nested("id", "parent_run_id", None), 0.5, "dates"),
    "Datadog's zero above": (nested("span_id", "parent_id", "0"), 0.5, "dates"),
    "seconds of no unit": (logged([0, 1, 2]), 1.0, "seconds, the only unit in which the rate"),
    "nginx's request_time": (logged(DATES[:3], request_time=0.5), 1.0, "dates"),
    "the endpoint's log": (
        "".join(
            logged([DATES[2 * n]], seconds=float(n), status=200, request_id="own") for n in range(3)
        ),
        1.0,
        "the endpoint's access log: dates",
    ),
    "seconds of something else": (
        logged(["2026-01-01 00:00:00 UTC", DATES[4]], seconds=3.0),
        0.25,
        "a log: dates",
    ),
    "one answer, one audio of none": (
        logged(DATES[:3], choices=[{"message": {"audio": None}}], num_audio=0, image="a/b:1.2"),
        1.0,
        "dates",
    ),
    "hash_ids in CSV": (
        'ts,input_length,output_length,hash_ids\n0,1100,9,"[1, 2, 3]"\n2,1100,9,"[1, 2, 4]"',
        0.5,
        "blocks of 512",
    ),
    **{
        f"{unit}seconds since 1970": (
            logged([(EPOCH_S + n) * per_s for n in range(3)]),
            1.0,
            f"{unit}seconds since",
        )
        for unit, per_s in (("milli", 10**3), ("micro", 10**6), ("nano", 10**9))
    },
    "seconds since 1970": (logged([EPOCH_S + n for n in range(3)], key="ts"), 1.0, "seconds since"),
    "a number as text": (
        logged([str(EPOCH_S * 1000 + 2000 * n) for n in range(3)]),
        0.5,
        "milliseconds",
    ),
    "a unit in the key": (
        logged([0, 2000, 4000], key="arrival_time_ms"),
        0.5,
        "a log: milliseconds",
    ),
    "CSV": (
        "timestamp_ms,prompt_tokens,completion_tokens\n0,500,60\n4000,500,60\n",
        0.25,
        "milliseconds",
    ),
    "CSV of floats": (
        f"ts,input_tokens,output_tokens\n{EPOCH_S},500.0,60.0\n{EPOCH_S + 2},500,60\n",
        0.5,
        "1970",
    ),
    "Bailian": (mooncake(3.0, 16, **CHAT), 1 / 3, "Qwen-Bailian: seconds, blocks of 16"),
    "Bailian without ids": (mooncake(3.0, None, **CHAT), 1 / 3, "Qwen-Bailian: seconds"),
    "Mooncake": (mooncake(500.0, 512), 2.0, "Mooncake: milliseconds, blocks of 512"),
    "blocks of 64": (mooncake(500.0, 64), 2.0, "Mooncake: milliseconds, blocks of 64"),
    "Mooncake, too slow for seconds": (mooncake(4000.0, None), 0.25, "Mooncake: milliseconds"),
    "Mooncake's keys since 1970": (
        lines(
            *(
                {"timestamp": str((EPOCH_S + n) * 10**9), "input_length": 500, "output_length": 60}
                for n in range(3)
            )
        ),
        1.0,
        "nanoseconds since",
    ),
    "BurstGPT 3": (
        f"{BURST3}19440110.0,a,43,GPT-4,500,60,560,a\n19440112.0,a,2,GPT-4,500,60,560,b\n",
        0.5,
        "BurstGPT: seconds",
    ),
    "OTLP of old and new names": (spans(("a", "", 0, 500), ("b", "", 4, 500)), 0.25, "spans"),
    "OTLP in the names of protobuf": (
        spans(("a", "", 0, 500), ("b", "", 4, 500))
        .replace("resourceSpans", "resource_spans")
        .replace("scopeSpans", "scope_spans")
        .replace("startTimeUnixNano", "start_time_unix_nano")
        .replace("intValue", "int_value"),
        0.25,
        "a log: nanoseconds since",
    ),
    "a gateway's span above the engine's": (
        spans(("a", "", 0, 500), ("x", "a", 0, None), ("b", "x", 1, 500), ("c", "", 4, 500)),
        0.25,
        "spans",
    ),
    "an agent's span above its calls": (
        spans(("a", "", 0, 1000), ("b", "a", 1, 500), ("c", "a", 3, 500)).replace(
            '{"doubleValue": 60}', '{"doubleValue": 120}', 1
        ),
        0.5,
        "spans",
    ),
    "a span that was exported twice": (
        spans(("a", "", 0, 500), ("a", "", 0, 500), ("c", "", 4, 500)),
        0.25,
        "spans",
    ),
    "spans of the console exporter": (
        "\n".join(json.dumps(each, indent=2) for each in CONSOLE),
        1.0,
        "dates",
    ),
    "Jaeger": (json.dumps(JAEGER), 1.0, "microseconds since"),
    "Vidur": (
        "arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,500,60\n4.0,500,60\n",
        0.25,
        "Vidur: seconds",
    ),
    "tabs between cells": (
        "arrival_time_ns\tinput_toks\toutput_toks\n0\t500\t60\n4000000000\t500\t60\n",
        0.25,
        "nano",
    ),
    "OpenInference": (
        lines(
            *(
                {
                    "start_time": DATES[n],
                    "attributes": {"llm": {"token_count": {"prompt": 500, "completion": 60}}},
                }
                for n in range(3)
            )
        ),
        1.0,
        "dates",
    ),
    "Langfuse": (json.dumps(LANGFUSE), 1.0, "dates"),
    "LiteLLM": (LITELLM, 1.0, "dates"),
    "OpenAI's answers": (OPENAI, 1.0, "seconds since"),
    "Dynamo's request trace": (DYNAMO, 1.0, "milliseconds since"),
    "a page of an API": (json.dumps({"data": LANGFUSE}), 1.0, "dates"),
}


@pytest.mark.parametrize(("text", "rate", "read_as"), READ.values(), ids=READ)
def test_rate_and_lengths_are_the_files(
    tmp_path: Path, text: str, rate: float, read_as: str
) -> None:
    """Each is named as what it was read as, and what is written of it reads back equal."""
    file = tmp_path / "trace"
    file.write_text(text)
    read = read_trace(file)
    found = read.arrivals
    assert (len(found) - 1) / found.due_s[-1] == pytest.approx(rate, abs=1e-4)
    assert set(found.input_tokens) <= {500, 1100}
    assert set(found.output_tokens) <= {60, 9}
    assert read_as in read.file.lines()[0]
    again = tmp_path / "again"
    write_schedule(found.requests(), again)
    for name, column in found.columns().items():
        np.testing.assert_array_equal(read_trace(again).arrivals.columns()[name], column)


OPEN = "prompt_tokens"
REFUSED = {
    "seconds under Mooncake's keys": (
        mooncake(3.0, None),
        "as seconds 0.3333 requests/s over 21 s; as milliseconds 333.3",
    ),
    "seconds and blocks of Bailian without its keys": (
        mooncake(3.0, 16),
        "as seconds 0.3333 requests/s over 21 s; as milliseconds 333.3",
    ),
    "blocks of 64, and a rate of both": (mooncake(100.0, 64), "as milliseconds 10 requests/s"),
    "seconds and Mooncake's blocks": (mooncake(3.0, 512), "as milliseconds 333.3 requests/s"),
    "milliseconds under Bailian's keys": (mooncake(3000.0, 16, **CHAT), "as milliseconds 0.333"),
    "a date in seconds under Mooncake's keys": (
        lines({"timestamp": EPOCH_S, "input_length": 5, "output_length": 5}),
        "2026-01-01 in seconds since 1970",
    ),
    "a date in seconds under a key of milliseconds": (
        logged([EPOCH_S], key="timestamp_ms"),
        "2026-01-01",
    ),
    "numbers without a unit": (logged([0, 50, 100]), "as milliseconds"),
    "microseconds without a unit": (
        logged([n * 200_000 for n in range(9)]),
        "as milliseconds 0.005 requests/s over 1,600 s; as microseconds 5",
    ),
    "nanoseconds without a unit": (logged([n * 10**9 for n in range(9)]), "as nanoseconds 1 req"),
    "six an hour, or many": (logged([n * 600 for n in range(9)]), "as milliseconds 1.667"),
    "times that do not ascend": (logged([0, 2, 1, 3]), "as seconds 1 requests/s over 3 s"),
    "dates as numbers": (
        logged([20260101120000 + 3 * n for n in range(9)]),
        "as seconds 0.3333",
    ),
    "days": (logged(["2026-01-01", "2026-01-02"]), "one whose time is 2026-01-01"),
    "a duration for a time": (
        lines({"request_time": 0.5, "prompt_tokens": 5, "output_tokens": 5}),
        "without a time",
    ),
    "zero, and then a date": (logged([0, EPOCH_S, EPOCH_S + 1]), "as seconds"),
    "OpenAI's usage by the hour": (logged([EPOCH_S], num_model_requests=50), "num_model_requests"),
    "a day of LiteLLM": (logged(DATES[:1], api_requests=9), "api_requests is 9"),
    "two choices": (logged(DATES[:1], choices=[{"index": 0}, {"index": 1}]), "choices is"),
    "Gemini's thoughts": (
        logged(DATES[:1], usageMetadata={"thoughtsTokenCount": 900}),
        "thoughtsTokenCount is 900",
    ),
    "Gemini's modalities": (
        logged(DATES[:1], promptTokensDetails=[{"modality": "IMAGE", "tokenCount": 258}]),
        "modality is 'IMAGE'",
    ),
    "modalities": (logged(DATES[:1], modalities=["text", "audio"]), "modalities is"),
    "a transcription": (logged(DATES[:1], call_type="atranscription"), "call_type is"),
    "a row after others": (logged(DATES[:1], start_after=["r"]), "start_after is"),
    "messages with an image": (logged(DATES[:1], messages=IMAGE), "type is 'image_url'"),
    "the same as text": (logged(DATES[:1], messages=json.dumps(IMAGE)), "type is 'image_url'"),
    "turns of a conversation": (logged(DATES[:1], conversation_id="c", delay=5), "delay is 5"),
    "an answer in parts": (
        logged(DATES[:1], request_id="r") + logged(DATES[1:2], request_id="r", output_tokens=61),
        ":2: request_id is 'r'",
    ),
    "a line twice": (logged([DATES[0]] * 2, id="r"), ":2: id is 'r'"),
    "a column twice": (
        "time,prompt_tokens,prompt_tokens,output_tokens\n2026-01-01T00:00:00Z,5,600,7\n",
        "prompt_tokens is two columns",
    ),
    "a schedule's row without a time": (
        lines({"due_s": 0, "input_tokens": 5, "output_tokens": 5}, {"input_tokens": 5}),
        ":2: due_s is missing",
    ),
    "numbers of two units": (logged([EPOCH_S, EPOCH_S * 1000]), "one whose time is 1767225600000"),
    "a date after numbers": (logged([EPOCH_S, "2026-01-01T00:00:00"]), ":2 "),
    "milliseconds under BurstGPT's columns": (
        BURST3.replace("Session ID,Elapsed time,", "") + "0,m,5,5,10,a\n3000,m,5,5,10,a\n",
        "as milliseconds 0.333",
    ),
    "a row that depends on another": (logged([EPOCH_S], depends_on=["a"]), "depends_on"),
    "turns with a delay": (logged([EPOCH_S], session_id="s", delay_ms=0), "delay_ms"),
    "a parent under Mooncake's keys": (
        mooncake(500.0, 512, parent_request_id="r"),
        "parent_request_id",
    ),
    "images": (logged([EPOCH_S], num_images=2), "num_images is 2"),
    "images in a list": (logged([EPOCH_S], images=["a.png"]), "images is"),
    "audio": (
        logged([EPOCH_S], usage={"prompt_tokens_details": {"audio_tokens": 7}}),
        "audio_tokens",
    ),
    "a type of Bailian": (mooncake(3.0, 16, **CHAT | {"type": "image"}), "type is 'image'"),
    "several answers": (logged([EPOCH_S], n=2), ":1: n is 2"),
    "tokens beside those of the prompt": (
        lines(
            {
                "time": EPOCH_S,
                "usage": {"input_tokens": 5, "output_tokens": 5, "cache_read_input_tokens": 900},
            }
        ),
        "cache_read_input_tokens",
    ),
    "two counts": (
        logged([EPOCH_S], usage={"prompt_tokens": 400}),
        "what usage.prompt_tokens says, which is 400",
    ),
    "one request on two lines": (
        logged([EPOCH_S, EPOCH_S + 1], request_id="r"),
        ":2: request_id is 'r'",
    ),
    "two tokenizers": (
        logged(DATES[:1], native_tokens_prompt=6),
        "native_tokens_prompt says, which is 6",
    ),
    "spans of other tokens above one": (
        spans(("a", "", 0, 500), ("b", "a", 1, 400)),
        "the sum of several",
    ),
    "a span within one of the same tokens": (
        spans(("a", "", 0, 500), ("b", "absent", 1, 500)),
        "span b has the trace and the tokens of",
    ),
    "a list that is cut off": (json.dumps(LANGFUSE)[:-1], "cut off"),
    "half a token": (logged([EPOCH_S], prompt_tokens="500.5"), "prompt_tokens is '500.5'"),
    "a cell too many": ("ts,prompt_tokens,output_tokens\n1,2,3,4\n", ":2 "),
    "no time": (lines({"prompt_tokens": 5, "output_tokens": 5}), "without a time"),
    "no request": (lines({"level": "info", "msg": "ok"}), "its keys are level, msg"),
}


@pytest.mark.parametrize(("text", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_certain_is_refused(tmp_path: Path, text: str, message: str) -> None:
    """The message names what was found, and how to decide."""
    file = tmp_path / "trace"
    file.write_text(text)
    with pytest.raises(InputError) as refused:
        read_trace(file)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("text", "reading", "rate"),
    [
        (mooncake(3.0, None), TraceReading(time_unit="s"), 1 / 3),
        (mooncake(500.0, None), TraceReading(time_unit="ms"), 2.0),
        (mooncake(3.0, 16), TraceReading(time_unit="s"), 1 / 3),
        (mooncake(3000.0, 16, **CHAT), TraceReading(time_unit="ms"), 1 / 3),
        (mooncake(500.0, 64), TraceReading(time_unit="ms"), 2.0),
        (mooncake(500.0, 512), TraceReading(time_unit="us"), 2000.0),
        (logged([0, 1, 2]), TraceReading(time_unit="s"), 1.0),
        (logged([0, 4, 8], num_images=0), TraceReading(time_unit="ms"), 250.0),
        (
            logged([0], num_images=1) + logged([0, 1]),
            TraceReading(time_unit="s", skip_images=True),
            1.0,
        ),
    ],
)
def test_options_decide(tmp_path: Path, text: str, reading: TraceReading, rate: float) -> None:
    """Unit, format, blocks and images, in the words of the user."""
    file = tmp_path / "trace"
    file.write_text(text)
    found = read_trace(file, reading).arrivals
    assert (len(found) - 1) / found.due_s[-1] == pytest.approx(rate)


@pytest.mark.parametrize(
    ("text", "reading", "message"),
    [
        (LITELLM, TraceReading(time_unit="s"), "times are dates"),
        (logged([0], key="time_ms"), TraceReading(time_unit="s"), "a unit that fits time_ms"),
        (logged([EPOCH_S * 1000]), TraceReading(time_unit="s"), "--time-unit is 's'"),
        (mooncake(500.0, 100), TraceReading(time_unit="ms"), "are 11 ids for 1100 tokens"),
    ],
)
def test_options_that_the_file_contradicts_are_refused(
    tmp_path: Path, text: str, reading: TraceReading, message: str
) -> None:
    file = tmp_path / "trace"
    file.write_text(text)
    with pytest.raises(InputError) as refused:
        read_trace(file, reading)
    assert message in str(refused.value)


@pytest.mark.parametrize("block", [16, 64, 256, 1024])
def test_blocks_of_any_size_are_equal_where_their_tokens_are(tmp_path: Path, block: int) -> None:
    """Prompts share the blocks of 512 tokens in which all their ids agree, and no other."""
    tokens, per = 2048, 2048 // block
    same = list(range(per))
    other = [*same[:-1], 99]
    rows = [{"timestamp": n * 1000, "input_length": tokens, "output_length": 1, "hash_ids": ids}
            for n, ids in enumerate([same, same, other])]  # fmt: skip
    file = tmp_path / "trace"
    file.write_text(lines(*rows))
    found = read_trace(file, TraceReading(time_unit="ms")).arrivals.content
    assert found is not None
    assert found[0] == found[1]
    assert len(set(found[0])) == tokens // 512
    differing = max(1, block // 512)
    assert found[2][:-differing] == found[0][:-differing]
    assert not set(found[2][-differing:]) & set(found[0])


def test_what_is_left_out_or_not_read_is_said(tmp_path: Path) -> None:
    """By its reason, with its number; keys by name."""
    file = tmp_path / "trace"
    file.write_text(
        logged([EPOCH_S, EPOCH_S + 1], priority=3)
        + lines({"time": EPOCH_S, "route": "/health"})
        + logged([EPOCH_S + 2], output_tokens=0)
        + logged([EPOCH_S + 2], num_images=1)
    )
    read = read_trace(file, TraceReading(skip_images=True), skip_unanswered=True)
    assert read.file.lines() == [
        "read as a log: seconds since 1970",
        "left out: 1 lines without token counts",
        "left out: 1 requests with images, audio or video",
        "left out: 1 requests without an answer",
        "keys that are not read: priority, route",
    ]
