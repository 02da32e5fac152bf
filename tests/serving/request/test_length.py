"""The length of requests: the operator's limit of answers, and what answers teach of texts."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minicluster.errors import InputError
from serving.protocol.messages import RequestRefused
from serving.request.cost import (
    MAX_OUTPUT_TOKENS,
    TokenCounts,
    apply_token_limit,
    prompt_blocks,
    prompt_tokens,
    read_token_limit,
)

CONTEXT = 200
HI = {"role": "user", "content": "hi"}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=40)
@given(st.sampled_from(["prompt", "messages"]), JSON)
def test_whatever_a_prompt_is_the_engine_refuses_not_we(name: str, given_: object) -> None:
    """No JSON breaks the bound on the length of answers; no answer exceeds the limit."""
    kind = "chat" if name == "messages" else "completions"
    limited = apply_token_limit(kind, {name: given_, "max_tokens": None}, 16, CONTEXT)
    assert limited[name] == given_
    assert 1 <= (limited["max_tokens"] or 1) <= 16


@pytest.mark.parametrize(
    ("limit", "body", "tokens"),
    [
        (16, {"prompt": "x" * 50, "max_tokens": None}, 16),
        (16, {"prompt": "x" * 130, "max_tokens": None}, 6),
        (16, {"prompt": [1] * 130, "max_tokens": None}, 6),
        (16, {"prompt": [1.0] * 130, "max_tokens": None}, 6),
        (16, {"prompt": [[1] * 130, [1]], "max_tokens": None}, 6),
        (16, {"prompt": ["a", "x" * 130], "max_tokens": None}, 6),
        (16, {"prompt": 1, "max_tokens": None}, 16),
        (16, {"prompt": [1] * 135, "max_tokens": None}, 1),
        (16, {"prompt": [1] * 136, "max_tokens": None}, None),  # the engine says so
        (16, {"messages": [{"content": "x" * 130}]}, 6),
        (16, {"messages": None}, 16),
        (16, {"messages": [{"content": "x" * 110}], "tools": [{"type": "function"}]}, 4),
        (3, {"prompt": "x"}, 3),
        (15, {"prompt": "x"}, 15),
        (3, {"prompt": [1] * CONTEXT}, 3),
        (None, {"prompt": "x", "max_tokens": 10**9}, 10**9),
    ],
)
def test_a_request_without_length_gets_the_limit_or_what_fits(
    limit: int | None, body: dict[str, object], tokens: int | None
) -> None:
    """The longest prompt and 64 tokens of a template decide; of text each byte may be a token."""
    kind = "chat" if "messages" in body else "completions"
    assert apply_token_limit(kind, body, limit, CONTEXT) == {**body, "max_tokens": tokens}


@pytest.mark.parametrize(
    ("kind", "lengths", "param"),
    [
        ("completions", {}, None),  # the engine makes 16
        ("completions", {"max_tokens": 20}, None),
        ("completions", {"max_tokens": 20, "max_completion_tokens": 21}, None),
        ("chat", {"max_completion_tokens": 20, "max_tokens": 1}, None),
        ("completions", {"max_tokens": 21, "max_completion_tokens": 1}, "max_tokens"),
        ("completions", {"min_tokens": 21}, "min_tokens"),
        ("chat", {"max_completion_tokens": 21}, "max_completion_tokens"),
        ("chat", {"max_completion_tokens": 1, "max_tokens": 21}, "max_tokens"),
    ],
)
def test_a_request_for_more_is_refused(
    kind: str, lengths: dict[str, object], param: str | None
) -> None:
    """With the parameter at fault, whichever the engine reads here; up to the limit it stays."""
    body = {"prompt": "x", **lengths}
    if param is None:
        assert apply_token_limit(kind, body, 20, CONTEXT) == body
        return
    with pytest.raises(RequestRefused) as refused:
        apply_token_limit(kind, body, 20, CONTEXT)
    assert (refused.value.refusal.status, refused.value.refusal.param) == (400, param)


def test_a_limit_is_a_number_of_tokens() -> None:
    assert read_token_limit({}) is None
    assert read_token_limit({MAX_OUTPUT_TOKENS: "7"}) == 7
    for given_ in ("", "0", "-1", "1.5", "many"):
        with pytest.raises(InputError):
            read_token_limit({MAX_OUTPUT_TOKENS: given_})


def _counted(*texts: tuple[int, int], times: int = 200) -> TokenCounts:
    """Return what texts of these bytes and tokens teach, all of them many times."""
    counts = TokenCounts()
    for _ in range(times):
        for size_bytes, tokens in texts:
            counts.add(size_bytes, tokens)
    return counts


@pytest.mark.parametrize("tokens_per_byte", [0.1, 0.25, 0.6])
@pytest.mark.parametrize("template_tokens", [0, 30, 120])
def test_texts_of_all_lengths_teach_both(tokens_per_byte: float, template_tokens: int) -> None:
    """The line is found: what is added to every text, and the tokens of a byte."""
    lengths = (10, 100, 1000, 8000)
    counts = _counted(*((n, template_tokens + round(n * tokens_per_byte)) for n in lengths))
    assert counts.estimate.tokens_per_byte == pytest.approx(tokens_per_byte, rel=0.02)
    assert counts.estimate.overhead_tokens == pytest.approx(template_tokens, rel=0.06, abs=3)


def test_short_texts_fit_the_constant() -> None:
    """Where no line fits all lengths, long texts do not make every short one look twice as long."""
    counts = _counted((10, 40), (1000, 300), (8000, 1500))
    assert prompt_tokens("x" * 10, counts.estimate) == pytest.approx(40, rel=0.25)
    assert prompt_tokens("x" * 8000, counts.estimate) == pytest.approx(1500, rel=0.05)


@pytest.mark.parametrize("tokens", [300, 1000, 2500])
def test_texts_of_one_length_teach_their_own_size(tokens: int) -> None:
    """One length alone, and few answers: the next such text is sized right."""
    counts = _counted((4000, tokens), times=5)
    assert prompt_tokens("x" * 4000, counts.estimate) == pytest.approx(tokens, rel=0.05)


@given(st.lists(st.tuples(st.integers(1, 10**7), st.integers(0, 10**6)), max_size=80))
def test_no_answer_teaches_more_than_a_token_a_byte(texts: list[tuple[int, int]]) -> None:
    """Whatever the engine counts: a token has one to 64 bytes, a template adds up to 256 tokens."""
    size = _counted(*texts, times=1).estimate
    assert 1 / 64 <= size.tokens_per_byte <= 1
    assert 0 <= size.overhead_tokens <= 256


@given(st.data())
def test_prompts_share_the_blocks_up_to_their_first_difference(data: st.DataObject) -> None:
    """Ids by 512, text by 2,048 bytes; a part of a block counts for nothing."""
    size, unit = data.draw(st.sampled_from([(512, [7]), (2048, "x")]))
    other: object = [8] if unit == [7] else "y"
    length, at = data.draw(st.integers(0, 3 * size)), data.draw(st.integers(0, 3 * size))
    prompt = unit * length  # type: ignore[operator]
    changed = prompt[:at] + other + prompt[at + 1 :]
    one, two = prompt_blocks(prompt), prompt_blocks(changed)
    assert len(one) == length // size
    same = [a == b for a, b in zip(one, two, strict=False)]
    assert same == [block < at // size for block in range(len(same))]


def test_a_conversation_begins_with_its_earlier_turns_and_tenants_share_nothing() -> None:
    turn = [{"role": "user", "content": "why " * 2000}]
    later = [*turn, {"role": "assistant", "content": "so"}, {"role": "user", "content": "and?"}]
    assert prompt_blocks(turn) == prompt_blocks(later)[: len(prompt_blocks(turn))]
    assert len(prompt_blocks(turn)) == 3
    assert not set(prompt_blocks(turn, "a")) & set(prompt_blocks(turn, "b"))
    assert [len(prompt_blocks("x" * size)) for size in (2047, 2048, 4096)] == [0, 1, 2]
    assert prompt_blocks(None) == prompt_blocks([]) == prompt_blocks({"a": 1}) == ()
