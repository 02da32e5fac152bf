from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.client.stream import CompletionStream, StreamError, check_encoding, other_answer
from minicluster.workload.samples import Sample
from tests.loadtest.made import make_sample

DONE = b"[DONE]"


def chunk(text: str, total: int | None) -> bytes:
    """Make one completion chunk; *total* is its running usage."""
    usage = {} if total is None else {"usage": {"prompt_tokens": 7, "completion_tokens": total}}
    return json.dumps({"choices": [{"text": text}]} | usage).encode()


def closing(total: int) -> bytes:
    """Make the closing chunk, which has usage and no choice."""
    usage = {"prompt_tokens": 7, "completion_tokens": total}
    return json.dumps({"choices": [], "usage": usage}).encode()


def read(*events: tuple[float, bytes], total: int | None = None) -> Sample:
    """Read a whole answer of *events* at their times, with a closing chunk if it has a *total*."""
    stream = CompletionStream()
    for at_s, data in events:
        stream.take(data, at_s)
    if total is not None:
        stream.take(closing(total), 1e9)
    stream.take(DONE, 1e9)
    stream.finish()
    return make_sample(
        output_tokens=stream.output_tokens,
        chunk_s=tuple(stream.chunk_s),
        chunk_tokens=tuple(stream.chunk_tokens),
    )


@given(st.lists(st.integers(1, 5), min_size=2), st.floats(0.001, 1), st.floats(0.001, 1))
def test_merged_tokens_give_the_true_tpot(merged: list[int], ttft_s: float, itl_s: float) -> None:
    totals = list(itertools.accumulate(merged))
    chunks = [(ttft_s + (total - 1) * itl_s, chunk("a", total)) for total in totals]
    sample = read(*chunks, total=totals[-1])

    assert sample.tpot_s == pytest.approx(itl_s)
    assert sample.chunk_tokens == tuple(merged)
    assert len(sample.gaps_s) == totals[-1] - merged[0]
    assert sum(sample.gaps_s) / len(sample.gaps_s) == pytest.approx(sample.tpot_s)


IDS = [{"token_ids": list(range(n)), "text": ""} for n in (1, 3, 2)]
LOGPROBS = [{"logprobs": {"tokens": ["a"] * n}, "text": "a" * n} for n in (1, 3, 2)]
FIRST, LAST = {"token_ids": [1], "text": "a"}, {"token_ids": [4, 5], "text": "de"}


def choices(*of_chunks: dict[str, Any]) -> list[bytes]:
    return [json.dumps({"choices": [choice]}).encode() for choice in of_chunks]


@pytest.mark.parametrize(
    ("chunks", "total", "chunk_s", "chunk_tokens", "tpot_s"),
    [
        # An early empty chunk is no first token; a token without text is one.
        ([chunk("", 0), chunk("", 1), chunk("b", 2)], None, (1, 2), (1, 1), 1.0),
        # Without running totals the closing usage counts, and the first chunk as one token.
        ([chunk("", None), *[chunk("a", None)] * 4], 4, (1, 2, 3, 4), (), 1.0),
        # A server that sends the total once, with its last chunk, has not sent all tokens in it.
        ([*[chunk("a", None)] * 4, chunk("", 4)], None, (0, 1, 2, 3), (), 1.0),
        # Where chunks have their tokens otherwise, merged ones still count as what they carry.
        (choices(*IDS), 6, (0, 1, 2), (1, 3, 2), 2 / 5),
        (choices(*LOGPROBS), 6, (0, 1, 2), (1, 3, 2), 2 / 5),
        # Chunks that do not have all five tokens have no counts: the first counts as one token.
        (choices(FIRST, {"text": "bc"}, LAST), 5, (0, 1, 2), (), 2 / 4),
        (choices(FIRST, {"text": ""}, LAST), 5, (0, 2), (), 2 / 4),
    ],
)
def test_a_chunk_counts_by_what_the_server_says_of_it(
    chunks: list[bytes],
    total: int | None,
    chunk_s: tuple[float, ...],
    chunk_tokens: tuple[int, ...],
    tpot_s: float | None,
) -> None:
    sample = read(*((float(k), data) for k, data in enumerate(chunks)), total=total)

    assert (sample.chunk_s, sample.chunk_tokens) == (chunk_s, chunk_tokens)
    assert sample.tpot_s == (tpot_s and pytest.approx(tpot_s))


def test_the_servers_own_numbers_are_kept() -> None:
    """Times of vLLM's metrics are kept in seconds, and the tokens that its cache had."""
    stream = CompletionStream()
    metrics = {"queue_time_ms": 20.0, "time_to_first_token_ms": 5.5, "tokens_per_second": 3}
    usage = {"prompt_tokens": 7, "completion_tokens": 1}
    details = {"prompt_tokens_details": {"cached_tokens": 3}}
    body = {"choices": [], "metrics": metrics, "usage": usage | details}
    stream.take(json.dumps(body).encode(), 1.0)

    assert stream.metrics_s == {"queue_time": 0.02, "time_to_first_token": 0.0055}
    assert (stream.input_tokens, stream.cached_tokens) == (7, 3)


def parted(text: str, usage: object = "none", **delta: object) -> bytes:
    """Make a chunk of a chat with any *usage* and more in its *delta*."""
    told = {} if usage == "none" else {"usage": usage}
    return json.dumps({"choices": [{"delta": {"content": text, **delta}}]} | told).encode()


PROMPT = {"prompt_tokens": 7, "total_tokens": 7}
ZERO = {"prompt_tokens": 7, "completion_tokens": 0, "total_tokens": 7}
ONE = ZERO | {"completion_tokens": 1}
TWO = ZERO | {"completion_tokens": 2}
ROLE: dict[str, object] = {"role": "assistant"}


@pytest.mark.parametrize(
    ("chunks", "total", "chunk_s", "chunk_tokens"),
    [
        # LiteLLM: usage without the answer's tokens with the role, none later, several tokens each.
        ([parted("", PROMPT, **ROLE), parted("a"), parted("b c d"), parted("e")], 5, (1, 2, 3), ()),
        # The same, and real totals later: the role is early, and no token.
        ([parted("", PROMPT, **ROLE), parted("a", ONE), parted("b", TWO)], 2, (1, 2), (1, 1)),
        ([parted("", None, **ROLE), parted("a", ONE), parted("b", TWO)], 2, (1, 2), (1, 1)),
        ([parted("", {}, **ROLE), parted("a", {}), parted("b", {})], 2, (1, 2), ()),
        # Totals that say nothing: always 0, always 1, one late, in some of the chunks, of zero.
        ([parted("a", ZERO), parted("b", ZERO), parted("c", ZERO)], 3, (0, 1, 2), ()),
        ([parted("a", ONE), parted("b", ONE), parted("c", ONE)], 3, (0, 1, 2), ()),
        ([parted("a", ZERO), parted("b", ONE), parted("c", TWO)], 3, (0, 1, 2), ()),
        ([parted("a", ONE), parted("b"), parted("c", ZERO | {"completion_tokens": 3})], 3,
         (0, 1, 2), ()),
        ([parted("", ZERO, **ROLE), parted("a"), parted("b")], 2, (1, 2), ()),
        # The answer's tokens as the difference of the others.
        ([parted("a", PROMPT | {"total_tokens": 8}), parted("b", PROMPT | {"total_tokens": 9})], 2,
         (0, 1), (1, 1)),
        # Generated otherwise: reasoning, a tool call, a refusal, an old function, sound.
        ([parted("", **ROLE), parted("", reasoning_content="a"), parted("b")], 2, (1, 2), ()),
        ([parted("", **ROLE), parted("", tool_calls=[{"function": {"name": "f"}}]),
          parted("", tool_calls=[{"function": {"arguments": "{"}}])], 2, (1, 2), ()),
        ([parted("", **ROLE), parted("", refusal="I"), parted("", refusal="no")], 2, (1, 2), ()),
        ([parted("", **ROLE), parted("", function_call={"name": "f"})], 1, (1,), ()),
        ([parted("", **ROLE), parted("", audio={"data": "x"})], 1, (1,), ()),
        # Azure: filters first, without a choice; data that is empty; chunks after the end.
        ([b'{"choices": [], "prompt_filter_results": []}', parted("a")], 1, (1,), ()),
        ([b'{"choices": null, "usage": {"prompt_tokens": 7}}', parted("a")], 1, (1,), ()),
        ([b"", parted("a"), b"", parted("b")], 2, (1, 3), ()),
        ([b'{"choices": [{"index": 0, "delta": null}]}', parted("a")], 1, (1,), ()),
    ],
)  # fmt: skip
def test_streams_of_many_servers_are_streams(
    chunks: list[bytes], total: int, chunk_s: tuple[float, ...], chunk_tokens: tuple[int, ...]
) -> None:
    sample = read(*((float(k), data) for k, data in enumerate(chunks)), total=total)

    assert (sample.chunk_s, sample.chunk_tokens) == (chunk_s, chunk_tokens)
    assert sample.output_tokens == total


@pytest.mark.parametrize(
    ("content_type", "body", "outcome", "says"),
    [
        ("text/html", b"<html>502 bad gateway</html>", "malformed", r"HTML \(text/html\).*502 bad"),
        ("", b"<!DOCTYPE html><style>p {}</style><p>Log in", "malformed", "HTML with .*: Log in"),
        ("text/event-stream", b"\xef\xbb\xbf\r\n<html>x", "malformed", "answered HTML"),
        ("application/json", b'{"error": {"message": "no room"}}', "server_error",
         "an error object with status 200: no room"),
        ("application/json", b'{"error": "no room"}', "server_error", "200: no room"),
        ("", b'{"object": "error", "message": "no room"}', "server_error", "200: no room"),
        ("application/json", b'{"detail": "no room"}', "server_error", "200: no room"),
        ("text/event-stream", b'{"error": {"code": 7}}', "server_error", '200: {"code": 7}'),
        ("application/json; charset=utf-8", b'{"choices": [{"text": "a"}]}', "malformed",
         r"one JSON document \(application/json\) with status 200, not a stream"),
        ("application/json", b'{"choices": [', "malformed", "one JSON document"),
        ("text/plain", b"busy", "malformed", "answered text/plain with status 200.*: busy"),
        ("", b"\x1f\x8b\x08", "malformed", "gzip, which was not asked for"),
    ],
)  # fmt: skip
def test_what_is_no_stream_is_named(
    content_type: str, body: bytes, outcome: str, says: str
) -> None:
    stream = CompletionStream()
    stream.content_type = content_type
    stream.receive(body, 0.0)

    with pytest.raises(StreamError, match=says) as caught:
        stream.finish()
    assert caught.value.outcome == outcome
    assert "Traceback" not in str(caught.value)
    assert other_answer("text/event-stream", b": ping\n\n") is None
    assert other_answer("", b"") is None


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "gzip, identity"])
def test_an_encoding_that_was_not_asked_for_is_named(encoding: str) -> None:
    with pytest.raises(StreamError, match=f"content-encoding {encoding}, which was not asked for"):
        check_encoding(encoding)
    check_encoding("identity")


@pytest.mark.parametrize(
    ("data", "outcome", "says"),
    [
        ([chunk("a", 1)], "cut", "after 1 chunks"),
        ([chunk("a", None), DONE], "no_usage", "no usage"),
        ([closing(0), DONE], "malformed", "no token"),
        ([chunk("a", None), closing(0), DONE], "no_usage", "no usage"),
        ([b"{}"], "malformed", "no completion chunk"),
        ([b"{garbage"], "malformed", "not JSON"),
        ([b"3"], "malformed", "not a JSON object"),
        ([b'{"error": {"message": "out of memory"}}'], "server_error", "out of memory"),
        ([chunk("a", 5), chunk("a", 3)], "malformed", "back by 2"),
        ([b'{"choices": [{}], "usage": {"completion_tokens": Infinity}}'], "malformed", "chunk"),
        ([b"[" * 100_000], "malformed", "no completion chunk"),
        # A total that leaps is wrong; one that creeps past what was asked is judged as a length.
        ([chunk("a", 5), chunk("a", 6), chunk("a", 11), chunk("a", 17)], "malformed", "6 tokens"),
    ],
)
def test_bad_streams_are_classified(data: list[bytes], outcome: str, says: str) -> None:
    stream = CompletionStream(asked_tokens=5)

    def follow() -> None:
        for event in data:
            stream.take(event, 0.0)
        stream.finish()

    with pytest.raises(StreamError, match=says) as caught:
        follow()
    assert caught.value.outcome == outcome


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=3) | st.integers(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    *("choices", "usage", "text", "delta", "logprobs", "token_ids", "metrics"),
                    *("completion_tokens", "prompt_tokens", "error", "x_ms"),
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)


@given(st.binary(max_size=20) | JSON.map(lambda value: json.dumps(value).encode()))
def test_no_answer_breaks_the_client(data: bytes) -> None:
    outcome = "ok"
    try:
        CompletionStream().take(data, 0.0)
    except StreamError as error:
        outcome = error.outcome

    assert outcome in {"ok", "malformed", "server_error"}
