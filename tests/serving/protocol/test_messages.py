"""What an answer says of its way, in headers."""

from __future__ import annotations

from serving.protocol.messages import PATH_HEADER, RequestPhases


def test_prefill_is_reported_with_its_queue_and_its_step() -> None:
    """Milliseconds as W3C wants them; queue and step are parts of prefill."""
    phases = RequestPhases(
        prefill_s=0.0451,
        handoff_s=0.0409,
        path="retried",
        reason="died",
        prefill_queue_s=0.0012,
        prefill_step_s=0.03,
    )
    assert phases.headers == {
        "Server-Timing": "prefill;dur=45.1, queue;dur=1.2, step;dur=30.0, handoff;dur=40.9",
        PATH_HEADER: "retried; reason=died",
    }


def test_a_prompt_that_decode_computes_has_no_step_in_prefill() -> None:
    """Its headers say 0 s of prefill step, by which a load test tells it from the others."""
    phases = RequestPhases(prefill_s=0.0003, handoff_s=0.05, path="local", reason="short")
    assert "step;dur=0.0," in phases.headers["Server-Timing"]
