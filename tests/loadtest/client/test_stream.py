from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.client.stream import CompletionStream, StreamError
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


def test_a_chunk_counts_by_its_running_total() -> None:
    """An early empty chunk is no first token; a token without text is one."""
    sample = read((0.1, chunk("", 0)), (0.5, chunk("", 1)), (0.6, chunk("b", 2)))

    assert sample.chunk_s == (0.5, 0.6)


def test_without_running_total_chunks_count_by_their_text() -> None:
    """Without running totals the closing usage counts, and the first chunk as one token."""
    texts = [(0.2 + 0.1 * k, chunk("a", None)) for k in range(4)]
    sample = read((0.1, chunk("", None)), *texts, total=4)

    assert sample.chunk_tokens == ()
    assert sample.tpot_s == pytest.approx(0.1)


@pytest.mark.parametrize(
    "choice",
    [
        lambda n: {"token_ids": list(range(n)), "text": ""},
        lambda n: {"logprobs": {"tokens": ["a"] * n}, "text": "a" * n},
        lambda n: {"logprobs": {"content": [{}] * n}, "delta": {"content": "a" * n}},
    ],
    ids=["token ids", "logprobs", "logprobs of a chat"],
)
def test_without_running_total_ids_and_logprobs_count(choice: Callable[[int], Any]) -> None:
    """Where chunks have their tokens otherwise, merged ones still count as what they carry."""
    events = [json.dumps({"choices": [choice(tokens)]}).encode() for tokens in (1, 3, 2)]
    sample = read(*((float(k), event) for k, event in enumerate(events)), total=6)

    assert sample.chunk_tokens == (1, 3, 2)
    assert sample.tpot_s == pytest.approx(2 / 5)


@pytest.mark.parametrize("second", [{"text": "bc"}, {"text": ""}], ids=["no count", "no chunk"])
def test_counts_of_a_part_are_not_used(second: dict[str, str]) -> None:
    """Chunks that do not have all five tokens have no counts: the first counts as one token."""
    choices = [{"token_ids": [1], "text": "a"}, second, {"token_ids": [4, 5], "text": "de"}]
    events = [json.dumps({"choices": [choice]}).encode() for choice in choices]
    sample = read(*((float(k), event) for k, event in enumerate(events)), total=5)

    assert sample.chunk_tokens == ()
    assert sample.tpot_s == pytest.approx(2 / 4)


def test_usage_in_the_last_chunk_alone_is_no_running_total() -> None:
    """A server that sends the total once, with its last chunk, has not sent all tokens in it."""
    sample = read(*((float(k), chunk("a", None)) for k in range(4)), (9.0, chunk("", 4)))

    assert sample.chunk_s == (0.0, 1.0, 2.0, 3.0)
    assert sample.output_tokens == 4


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


@pytest.mark.parametrize(
    ("data", "outcome"),
    [
        ([chunk("a", 1)], "cut"),
        ([chunk("a", None), DONE], "no_usage"),
        ([closing(0), DONE], "malformed"),
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
    stream = CompletionStream()

    def follow() -> None:
        for event in data:
            stream.take(event, 0.0)
        stream.finish()

    with pytest.raises(StreamError) as caught:
        follow()
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
    outcome = "ok"
    try:
        CompletionStream().take(data, 0.0)
    except StreamError as error:
        outcome = error.outcome

    assert outcome in {"ok", "malformed", "server_error"}
