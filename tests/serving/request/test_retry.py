from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.protocol.messages import Refusal
from serving.request.prefill import (
    DIED,
    TIMEOUT,
    LocalPrefill,
    PrefillAttempt,
    may_be_short,
    must_be_local,
    next_step,
)
from tests.serving.configs import unplanned


@given(
    failures=st.lists(st.sampled_from([DIED, TIMEOUT]), max_size=4),
    live=st.none() | st.integers(0, 9),
    left_s=st.floats(-5, 2),
    fallback=st.sampled_from(["fail", "local"]),
)
def test_every_request_ends(
    failures: list[str], live: int | None, left_s: float, fallback: str
) -> None:
    """After two attempts, without time or without a replica there is an answer, by the policy."""
    step = next_step(failures, live=live, left_s=left_s, config=unplanned(fallback=fallback))
    if isinstance(step, PrefillAttempt):
        assert live != 0
        assert len(failures) < 2
        assert step.timeout_s <= max(left_s, left_s / 2)
    elif fallback == "local":
        assert isinstance(step, LocalPrefill)
        assert step.path == "fallback-local"
    else:
        assert isinstance(step, Refusal)
        assert step.status in {503, 504}
        assert "Retry-After" in step.headers


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"prompt": "x", "n": 2}, "n"),
        ({"prompt": ["a", "b"]}, "prompt-list"),
        ({"prompt": [[1], [2]]}, "prompt-list"),
        ({"prompt": "x", "use_beam_search": True}, "beam-search"),
        ({"prompt": "x", "prompt_logprobs": 0}, "prompt-logprobs"),
        ({"messages": [], "echo": True}, "echo"),
        ({"prompt": "x", "n": None, "echo": False, "prompt_logprobs": None}, None),
        ({"prompt": [1, 2, 3], "n": 1, "logprobs": 2}, None),
        ({"messages": [{"role": "user", "content": "hi"}], "tools": []}, None),
    ],
)
def test_what_one_fetched_cache_cannot_answer_is_local(
    body: dict[str, object], reason: str | None
) -> None:
    """Several answers, and what looks at the prompt; all else is prefilled remotely."""
    local = reason and LocalPrefill(reason=reason)
    assert must_be_local(body) == local


def test_prompts_up_to_the_threshold_are_local() -> None:
    """Without a threshold nothing is counted."""
    for body, threshold, may_be in (
        ({"prompt": "x"}, 0, False),
        ({"prompt": [1] * 8}, 8, True),
        ({"prompt": [1] * 9}, 8, False),
        ({"prompt": "a b c"}, 8, True),
        ({"prompt": "a" * 1000}, 8, False),
        ({"messages": [{"content": "a" * 1000}]}, 8, False),
    ):
        assert may_be_short(body, threshold) == may_be, body
