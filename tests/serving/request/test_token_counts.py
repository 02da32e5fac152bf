"""What answers teach of the size of texts, and what they never do, whatever they say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.request.length import TokenCounts, counted_text_bytes, prompt_tokens, prompts_in

HI = {"role": "user", "content": "hi"}


def _counted(*texts: tuple[int, int], times: int = 200) -> TokenCounts:
    """Return what texts of these bytes and tokens teach, all of them many times."""
    counts = TokenCounts()
    for _ in range(times):
        for size_bytes, tokens in texts:
            counts.add(size_bytes, tokens)
    return counts


def test_many_short_chats_say_nothing_of_a_long_prompt() -> None:
    """Thirty tokens of a template beside two bytes are no fifteen tokens a byte."""
    counts = _counted((2, 31), (5, 32), (11, 33))
    assert prompt_tokens("x" * 4000, counts.estimate) == pytest.approx(1030, rel=0.02)
    assert prompt_tokens("hi", counts.estimate) == pytest.approx(31, abs=1)


@pytest.mark.parametrize("tokens_per_byte", [0.1, 0.25, 0.6])
@pytest.mark.parametrize("template_tokens", [0, 30, 120])
def test_texts_of_all_lengths_teach_both(tokens_per_byte: float, template_tokens: int) -> None:
    """The line is found: what is added to every text, and the tokens of a byte."""
    lengths = (10, 100, 1000, 8000)
    counts = _counted(*((n, template_tokens + round(n * tokens_per_byte)) for n in lengths))
    assert counts.estimate.tokens_per_byte == pytest.approx(tokens_per_byte, rel=0.02)
    assert counts.estimate.overhead_tokens == pytest.approx(template_tokens, rel=0.06, abs=3)


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


def test_what_no_answer_confirms_is_discounted() -> None:
    """A text of dense tokens does not shut the others out for ever: four bytes a token again."""
    counts = _counted((4000, 4000))
    assert counts.estimate.tokens_per_byte == pytest.approx(1, rel=0.01)
    for _ in range(150):
        counts.discount()
    assert counts.estimate.tokens_per_byte == pytest.approx(0.25, rel=0.01)


@pytest.mark.parametrize(
    ("kind", "body", "size_bytes"),
    [
        ("completions", {"prompt": "abc"}, 3),
        ("completions", {"prompt": "abc", "messages": [HI]}, 3),
        ("completions", {"prompt": "abc", "truncate_prompt_tokens": 1}, 0),
        ("completions", {"prompt": [1, 2]}, 0),
        ("completions", {"prompt": ["a", "b"]}, 0),
        ("chat", {"messages": [HI], "prompt": "x"}, 2),
        ("chat", {"messages": [HI, {"role": "assistant", "content": None}]}, 2),
        ("chat", {"messages": [{"role": "user", "content": [{"type": "text", "text": "é"}]}]}, 2),
        ("chat", {"messages": [HI], "tools": [{"type": "function"}]}, 2 + 22),
        ("chat", {"messages": [{"tool_calls": [{"id": "7", "function": {"arguments": "{}"}}]}]}, 2),
    ],
)
def test_bytes_that_a_count_of_tokens_is_of(
    kind: str, body: dict[str, object], size_bytes: int
) -> None:
    """All text that the template gets, of the endpoint's own fields, and of one prompt alone."""
    assert counted_text_bytes(kind, body) == size_bytes


def test_a_chat_is_one_prompt() -> None:
    """However many messages it has; what stands in fields of completions does not count."""
    [prompt] = prompts_in("chat", {"messages": [HI, HI], "prompt": ["a", "b"]})
    assert prompt_tokens(prompt) == 1
