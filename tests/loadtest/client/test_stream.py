from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.client.stream import CompletionStream, StreamError
from minicluster.workload.samples import Sample

if TYPE_CHECKING:
    from collections.abc import Callable


def chunk(text: str, total: int | None) -> bytes:
    """Make one completion chunk; *total* is its running usage."""
    body: dict[str, Any] = {"choices": [{"text": text}]}
    if total is not None:
        body["usage"] = {"prompt_tokens": 7, "completion_tokens": total}
    return json.dumps(body).encode()


def closing(total: int) -> bytes:
    """Make the closing chunk, which has usage and no choice."""
    usage = {"prompt_tokens": 7, "completion_tokens": total}
    return json.dumps({"choices": [], "usage": usage}).encode()


def sample_of(stream: CompletionStream) -> Sample:
    """Wrap what *stream* saw."""
    return Sample(
        index=0,
        in_window=True,
        due_s=0.0,
        send_s=0.0,
        end_s=9.0,
        asked_input_tokens=7,
        asked_output_tokens=stream.output_tokens or 0,
        input_tokens=stream.input_tokens,
        output_tokens=stream.output_tokens,
        chunk_s=tuple(stream.chunk_s),
        chunk_tokens=tuple(stream.chunk_tokens),
        outcome="ok",
    )


@given(st.lists(st.integers(1, 5), min_size=2), st.floats(0.001, 1), st.floats(0.001, 1))
def test_merged_tokens_give_the_true_tpot(merged: list[int], ttft_s: float, itl_s: float) -> None:
    """However the server merges tokens into chunks, TPOT is the time per token."""
    stream = CompletionStream()
    total = 0
    for tokens in merged:
        total += tokens
        stream.take(chunk("a" * tokens, total), ttft_s + (total - 1) * itl_s)
    stream.take(closing(total), 1e9)
    stream.take(b"[DONE]", 1e9)
    stream.finish()

    sample = sample_of(stream)
    assert sample.tpot_s == pytest.approx(itl_s)
    assert stream.chunk_tokens == merged
    assert len(sample.gaps_s) == total - merged[0]
    assert sum(sample.gaps_s) / len(sample.gaps_s) == pytest.approx(sample.tpot_s)


def test_early_empty_chunk_is_no_first_token() -> None:
    """A chunk that carries no token does not end the TTFT."""
    stream = CompletionStream()
    stream.take(chunk("", 0), 0.1)
    stream.take(chunk("a", 1), 0.5)

    assert stream.chunk_s == [0.5]


def test_token_without_text_is_a_token() -> None:
    """A chunk counts by its running total, not by its text."""
    stream = CompletionStream()
    stream.take(chunk("", 1), 0.1)
    stream.take(chunk("b", 2), 0.2)

    assert stream.chunk_s == [0.1, 0.2]


def test_without_running_total_chunks_count_by_their_text() -> None:
    """Without running totals the closing usage counts, and the first chunk as one token."""
    stream = CompletionStream()
    stream.take(chunk("", None), 0.1)
    for i in range(4):
        stream.take(chunk("a", None), 0.2 + 0.1 * i)
    stream.take(closing(4), 0.6)
    stream.take(b"[DONE]", 0.6)
    stream.finish()

    assert stream.chunk_tokens == []
    assert sample_of(stream).tpot_s == pytest.approx(0.1)


@pytest.mark.parametrize(
    "told",
    [
        lambda n: {"token_ids": list(range(n)), "text": ""},
        lambda n: {"logprobs": {"tokens": ["a"] * n}, "text": "a" * n},
        lambda n: {"logprobs": {"content": [{}] * n}, "delta": {"content": "a" * n}},
    ],
    ids=["token ids", "logprobs", "logprobs of a chat"],
)
def test_without_running_total_ids_and_logprobs_count(told: Callable[[int], Any]) -> None:
    """Where chunks say their tokens otherwise, merged ones still count as what they carry."""
    stream = CompletionStream()
    for k, tokens in enumerate([1, 3, 2]):
        stream.take(json.dumps({"choices": [told(tokens)]}).encode(), float(k))
    stream.take(closing(6), 9.0)
    stream.take(b"[DONE]", 9.0)
    stream.finish()

    assert stream.chunk_tokens == [1, 3, 2]
    assert sample_of(stream).tpot_s == pytest.approx(2 / 5)


@pytest.mark.parametrize(
    "told",
    [
        [{"token_ids": [1], "text": "a"}, {"text": "bc"}, {"token_ids": [4, 5], "text": "de"}],
        [{"token_ids": [1], "text": "a"}, {"text": ""}, {"token_ids": [4, 5], "text": "de"}],
    ],
    ids=["a chunk without its count", "tokens without a chunk"],
)
def test_counts_of_a_part_are_not_used(told: list[Any]) -> None:
    """Chunks that do not tell of all five tokens tell of none: the first chunk counts as one."""
    stream = CompletionStream()
    for k, choice in enumerate(told):
        stream.take(json.dumps({"choices": [choice]}).encode(), float(k))
    stream.take(closing(5), 9.0)
    stream.take(b"[DONE]", 9.0)
    stream.finish()

    assert stream.chunk_tokens == []
    assert sample_of(stream).tpot_s == pytest.approx(2 / 4)


def test_usage_in_the_last_chunk_alone_is_no_running_total() -> None:
    """A server that says the total once, with its last chunk, has not sent all tokens in it."""
    stream = CompletionStream()
    for k in range(4):
        stream.take(chunk("a", None), float(k))
    stream.take(chunk("", 4), 9.0)
    stream.take(b"[DONE]", 9.0)
    stream.finish()

    assert stream.chunk_s == [0.0, 1.0, 2.0, 3.0]
    assert stream.output_tokens == 4


def test_the_servers_own_times_are_kept() -> None:
    """What vLLM says of a request's phases is kept in seconds."""
    stream = CompletionStream()
    metrics = {"queue_time_ms": 20.0, "time_to_first_token_ms": 5.5, "tokens_per_second": 3}
    stream.take(json.dumps({"choices": [], "metrics": metrics}).encode(), 1.0)

    assert stream.metrics_s == {"queue_time": 0.02, "time_to_first_token": 0.0055}


@pytest.mark.parametrize(
    ("data", "outcome"),
    [
        ([chunk("a", 1)], "cut"),
        ([chunk("a", None), b"[DONE]"], "no_usage"),
        ([closing(0), b"[DONE]"], "malformed"),
        ([b"{garbage"], "malformed"),
        ([b"3"], "malformed"),
        ([b'{"error": {"message": "out of memory"}}'], "server_error"),
        ([chunk("a", 5), chunk("a", 3)], "malformed"),
        ([b'{"choices": [{}], "usage": {"completion_tokens": Infinity}}'], "malformed"),
        ([closing(10**12)], "malformed"),
        ([b"[" * 100_000], "malformed"),
    ],
)
def test_bad_streams_are_classified(data: list[bytes], outcome: str) -> None:
    """Every way a stream can go wrong has its own name."""
    stream = CompletionStream()

    def read() -> None:
        for piece in data:
            stream.take(piece, 0.0)
        stream.finish()

    with pytest.raises(StreamError) as caught:
        read()
    assert caught.value.outcome == outcome


def test_one_chunk_has_no_more_tokens_than_the_answer() -> None:
    """A total that leaps is wrong; one that creeps past what was asked is judged as a length."""
    stream = CompletionStream(asked_tokens=5)
    for total in (5, 6, 11):
        stream.take(chunk("a", total), 0.0)
    with pytest.raises(StreamError, match="6 tokens in one chunk; 5 were requested") as refused:
        stream.take(chunk("a", 17), 0.0)

    assert refused.value.outcome == "malformed"
    assert stream.chunk_tokens == [5, 1, 5]


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
    """Whatever a server sends is a chunk or a classified error, never a crash."""
    outcome = "ok"
    try:
        CompletionStream().take(data, 0.0)
    except StreamError as error:
        outcome = error.outcome

    assert outcome in {"ok", "malformed", "server_error"}
