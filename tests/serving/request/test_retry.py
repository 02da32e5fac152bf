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
    """The first of several replicas gets half of the deadline, the second all that is left."""
    assert next_step([], live=2, left_s=2.0, config=FAIL) == PrefillAttempt(timeout_s=1.0)
    assert next_step([TIMEOUT], live=2, left_s=1.0, config=FAIL) == PrefillAttempt(timeout_s=1.0)
    assert next_step([], live=1, left_s=2.0, config=FAIL) == PrefillAttempt(timeout_s=2.0)


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
    ],
)
def test_what_one_fetched_cache_cannot_answer_is_local(
    body: dict[str, object], reason: str
) -> None:
    """Several answers, and whatever looks at the prompt, are computed by decode alone."""
    assert must_be_local(body) == LocalPrefill(path="local", reason=reason)


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "x", "n": None, "echo": False, "prompt_logprobs": None},
        {"prompt": [1, 2, 3], "n": 1, "logprobs": 2},
        {"messages": [{"role": "user", "content": "hi"}], "tools": []},
    ],
)
def test_everything_else_goes_through_prefill(body: dict[str, object]) -> None:
    """One answer to one prompt is prefilled remotely, whatever is done with its tokens."""
    assert must_be_local(body) is None


def test_threshold() -> None:
    """Prompts up to the threshold are local, longer ones remote; without one nothing is counted."""
    assert short_enough(8, 8) == LocalPrefill(path="local", reason="short")
    assert short_enough(9, 8) is None
    assert short_enough(1, 0) is None
    assert not may_be_short({"prompt": "x"}, 0)
    assert may_be_short({"prompt": [1] * 8}, 8)
    assert not may_be_short({"prompt": [1] * 9}, 8)
    assert may_be_short({"prompt": "a b c"}, 8)
    assert not may_be_short({"prompt": "a" * 1000}, 8)
    assert not may_be_short({"messages": [{"content": "a" * 1000}]}, 8)
