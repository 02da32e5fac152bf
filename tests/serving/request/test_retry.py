from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.protocol.messages import Refusal
from serving.request.prefill_eligibility import may_be_short, must_be_local, short_enough
from serving.request.retry import DIED, NO_REPLICA, TIMEOUT, LocalPrefill, PrefillAttempt, next_step
from tests.serving.configs import unplanned

FAIL = unplanned()
LOCAL = unplanned(fallback="local")


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


def test_a_second_replica_has_half_of_the_time() -> None:
    for failures, live, left_s, timeout_s in (
        ([], 2, 2.0, 1.0),
        ([TIMEOUT], 2, 1.0, 1.0),
        ([], 1, 2.0, 2.0),
    ):
        step = next_step(failures, live=live, left_s=left_s, config=FAIL)
        assert step == PrefillAttempt(timeout_s=timeout_s)


@pytest.mark.parametrize(
    ("failures", "live", "status", "reason"),
    [
        ([], 0, 503, NO_REPLICA),
        ([DIED], 0, 503, NO_REPLICA),
        ([DIED, DIED], 1, 503, DIED),
        ([DIED, TIMEOUT], 1, 504, TIMEOUT),
        ([TIMEOUT], 1, 504, TIMEOUT),
    ],
)
def test_the_fallback_is_reported(failures: list[str], live: int, status: int, reason: str) -> None:
    """Without prefill a request fails with the reason, or is computed locally and says so."""
    left_s = 0.0 if failures == [TIMEOUT] else 1.0
    refusal = next_step(failures, live=live, left_s=left_s, config=FAIL)
    assert isinstance(refusal, Refusal)
    assert (refusal.status, refusal.code) == (status, reason)
    local = next_step(failures, live=live, left_s=left_s, config=LOCAL)
    assert local == LocalPrefill(path="fallback-local", reason=reason)


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
    local = reason and LocalPrefill(path="local", reason=reason)
    assert must_be_local(body) == local


def test_prompts_up_to_the_threshold_are_local() -> None:
    """Without a threshold nothing is counted."""
    assert short_enough(8, 8) == LocalPrefill(path="local", reason="short")
    assert (short_enough(9, 8), short_enough(1, 0)) == (None, None)
    for body, threshold, may_be in (
        ({"prompt": "x"}, 0, False),
        ({"prompt": [1] * 8}, 8, True),
        ({"prompt": [1] * 9}, 8, False),
        ({"prompt": "a b c"}, 8, True),
        ({"prompt": "a" * 1000}, 8, False),
        ({"messages": [{"content": "a" * 1000}]}, 8, False),
    ):
        assert may_be_short(body, threshold) == may_be, body
