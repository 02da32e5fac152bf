"""What an answer says of its way, in headers."""

from __future__ import annotations

from serving.protocol.messages import PATH_HEADER, RequestPhases


def test_phases_are_reported_as_the_engines_time_them() -> None:
    """Milliseconds as W3C wants them; routing to prefill is in none of them."""
    phases = RequestPhases(
        prefill_s=0.0451,
        decode_s=0.0409,
        prefill_replica="p0",
        path="retried",
        reason="died",
        prefill_queue_s=0.0012,
        prefill_step_s=0.03,
    )
    assert phases.headers == {
        "Server-Timing": "prefill_queue;dur=1.2, prefill;dur=30.0, handoff;dur=40.9",
        PATH_HEADER: "retried; reason=died",
    }


def test_a_prompt_that_decode_computes_has_no_handoff() -> None:
    """Its queue and its prefill are one sum, and nothing is handed over."""
    phases = RequestPhases(prefill_s=0.0003, decode_s=0.05, path="local", reason="short")
    expected = "queued_prefill;dur=50.0, kv_fetch;dur=0.0, first_decode_step;dur=0.0"
    assert phases.headers["Server-Timing"] == expected
