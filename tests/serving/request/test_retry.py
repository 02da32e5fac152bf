from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.protocol.messages import LocalPrefill, Refusal
from serving.request.prefill import (
    DIED,
    TIMEOUT,
    PrefillAttempt,
    may_be_short,
    must_be_local,
    next_step,
)
from tests.serving.configs import unplanned


@given(
    failures=st.lists(st.sampled_from([DIED, TIMEOUT]), max_size=4),
    live=st.none() | st.integers(0, 9),
    spent_s=st.floats(0, 9),
    fallback=st.sampled_from(["fail", "local"]),
)
def test_every_request_ends(
    failures: list[str], live: int | None, spent_s: float, fallback: str
) -> None:
    """After two attempts, without time or without a replica there is an answer, by the policy."""
    config = unplanned(prefill_deadline_s=4.0, fallback=fallback)
    step = next_step(failures, live=live, spent_s=spent_s, config=config)
    if isinstance(step, PrefillAttempt):
        assert live != 0
        assert len(failures) < 2
        assert step.timeout_s == 4.0 - spent_s
        assert step.patience_s in {step.timeout_s, step.timeout_s / 2}
    elif fallback == "local":
        assert isinstance(step, LocalPrefill)
        assert (step.path, step.seconds) == ("fallback-local", spent_s)
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
