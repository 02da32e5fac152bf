"""How long an answer may get: what is asked for, and what names no length."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minicluster.errors import InputError
from serving.protocol.messages import RequestRefused
from serving.request.length import apply_token_limit, read_token_limit

CONTEXT = 200
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(st.sampled_from(["prompt", "messages"]), JSON)
def test_whatever_a_prompt_is_the_engine_refuses_not_we(name: str, given_: object) -> None:
    """No JSON breaks the bound on the length of answers; no answer exceeds the limit."""
    kind = "chat" if name == "messages" else "completions"
    limited = apply_token_limit(kind, {name: given_, "max_tokens": None}, 16, CONTEXT)
    assert limited[name] == given_
    assert 1 <= (limited["max_tokens"] or 1) <= 16


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({"prompt": "x" * 50}, 16),
        ({"prompt": "x" * 130}, 6),
        ({"prompt": [1] * 130}, 6),
        ({"prompt": [1.0] * 130}, 6),
        ({"prompt": [[1] * 130, [1]]}, 6),
        ({"prompt": ["a", "x" * 130]}, 6),
        ({"prompt": 1}, 16),
        ({"messages": [{"role": "user", "content": "x" * 130}]}, 6),
        ({"messages": None}, 16),
        ({"messages": [{"content": "x" * 110}], "tools": [{"type": "function"}]}, 4),
    ],
)
def test_a_request_without_length_gets_the_limit_or_what_fits(
    body: dict[str, object], tokens: int
) -> None:
    """The longest prompt and 64 tokens of a template decide; of text each byte may be a token."""
    kind = "chat" if "messages" in body else "completions"
    asked = {**body, "max_tokens": None}
    assert apply_token_limit(kind, asked, 16, CONTEXT) == {**body, "max_tokens": tokens}


def test_where_nothing_fits_the_engine_says_so() -> None:
    """A prompt as long as the context passes as it is."""
    body = {"prompt": [1] * CONTEXT, "max_tokens": None}
    assert apply_token_limit("completions", body, 16, CONTEXT) == body


def test_a_completion_that_names_none_gets_no_more_than_the_engine_makes() -> None:
    """A limit above the default of 16 makes no answer longer, one below it makes them shorter."""
    assert apply_token_limit("completions", {"prompt": "x"}, 20, CONTEXT) == {"prompt": "x"}
    assert apply_token_limit("completions", {"prompt": "x"}, 3, CONTEXT)["max_tokens"] == 3
    assert (
        apply_token_limit("completions", {"prompt": [1] * CONTEXT}, 3, CONTEXT)["max_tokens"] == 3
    )


@pytest.mark.parametrize(
    ("kind", "lengths", "param"),
    [
        ("completions", {"max_tokens": 17}, "max_tokens"),
        ("completions", {"max_tokens": 17, "max_completion_tokens": 1}, "max_tokens"),
        ("completions", {"max_tokens": 16}, None),
        ("completions", {"max_tokens": 16, "max_completion_tokens": 17}, None),
        ("completions", {"min_tokens": 17}, "min_tokens"),
        ("chat", {"max_tokens": 17}, "max_tokens"),
        ("chat", {"max_completion_tokens": 17}, "max_completion_tokens"),
        ("chat", {"max_completion_tokens": 1, "max_tokens": 17}, "max_tokens"),
        ("chat", {"max_completion_tokens": 16, "max_tokens": 1}, None),
    ],
)
def test_a_request_for_more_is_refused(
    kind: str, lengths: dict[str, object], param: str | None
) -> None:
    """With the parameter at fault, whichever the engine reads here; up to the limit it stays."""
    body = {"prompt": "x", **lengths}
    if param is None:
        assert apply_token_limit(kind, body, 16, CONTEXT) == body
        return
    with pytest.raises(RequestRefused) as refused:
        apply_token_limit(kind, body, 16, CONTEXT)
    assert (refused.value.refusal.status, refused.value.refusal.param) == (400, param)


def test_without_a_limit_everything_passes() -> None:
    """A request for any length is passed on as it came where the operator sets no limit."""
    body = {"prompt": "x", "max_tokens": 10**9}
    assert apply_token_limit("completions", body, None, CONTEXT) == body


@pytest.mark.parametrize("given_", ["", "0", "-1", "1.5", "many"])
def test_a_limit_is_a_number_of_tokens(given_: str) -> None:
    """Anything else stops the start."""
    assert read_token_limit({}) is None
    assert read_token_limit({"MINICLUSTER_MAX_OUTPUT_TOKENS": "7"}) == 7
    with pytest.raises(InputError):
        read_token_limit({"MINICLUSTER_MAX_OUTPUT_TOKENS": given_})
