"""Measured rows with speculative decoding: what is read, refused, predicted and said."""

from __future__ import annotations

import pytest

from minicluster.errors import InputError
from sizing.evidence.measured_row import kind_of
from sizing.evidence.prediction import predict_row
from tests.sizing.evidence.rows import row

DRAFTS = {"mtp": "yes", "mtp_tokens": "3"}
GPT = {
    "model": "openai/gpt-oss-120b", "gpu": "h200-sxm", "gpus": "1", "tp": "1",
    "weight_dtype": "fp4", "concurrency": "4", "isl": "2000", "osl": "200",
}  # fmt: skip
QWEN = {
    "model": "Qwen/Qwen3.5-397B-A17B", "gpu": "b200-sxm", "engine": "sglang",
    "engine_version": "0.5.9", "gpus": "4", "tp": "4", "concurrency": "4", "isl": "1024",
}  # fmt: skip


def tpot_s(**cells: str) -> float:
    found = predict_row(row(**cells))
    assert found.status == "predicted", found.reason
    assert found.tpot_s is not None
    return found.tpot_s


def test_drafts_and_accepted_tokens_are_read() -> None:
    """They are a kind of load and a configuration of their own; without drafts nothing changes."""
    plain, drafting = row(mtp="no", mtp_tokens=""), row(**DRAFTS, accepted_tokens="1.5")
    assert (plain.speculative_tokens, plain.accepted_tokens) == (0, None)
    assert (drafting.speculative_tokens, drafting.accepted_tokens) == (3, 1.5)
    assert kind_of(plain) != kind_of(drafting) == "speculative"
    assert plain.configuration != drafting.configuration


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        ({"mtp": "yes"}, "mtp_tokens is missing; it has to be the tokens drafted in a step"),
        ({"mtp_tokens": "3"}, "mtp_tokens is '3'; it has to be 0: mtp does not say yes"),
        (DRAFTS | {"mtp_tokens": "1.5"}, "mtp_tokens is '1.5'; it has to be a whole number"),
        (
            DRAFTS | {"accepted_tokens": "4"},
            "accepted_tokens is '4'; it has to be at most mtp_tokens",
        ),
        (
            DRAFTS | {"accepted_tokens": "-1"},
            "accepted_tokens is '-1'; it has to be a finite number",
        ),
        ({"mtp": "perhaps"}, "mtp is 'perhaps'; it has to be one of no, yes"),
    ],
)
def test_contradictions_are_named(cells: dict[str, str], said: str) -> None:
    """Column, value and expectation."""
    with pytest.raises(InputError) as refused:
        row(**cells)
    assert f"rows.csv:2: {said}" in str(refused.value)


def test_a_model_without_a_head_or_without_an_acceptance_is_unsupported() -> None:
    """The reason says which, and nothing is guessed."""
    llama = predict_row(row(**DRAFTS, accepted_tokens="1"))
    assert (llama.status, "no draft head" in llama.reason) == ("unsupported", True)
    gpt = predict_row(row(**GPT, **DRAFTS))
    assert (gpt.status, "accepted_tokens" in gpt.reason) == ("unsupported", True)
    old = predict_row(row(**GPT | DRAFTS | {"engine": "trtllm", "engine_version": "0.9.0"}))
    assert old.status == "unsupported"


def test_accepted_drafts_shorten_the_time_per_token() -> None:
    """The more are accepted the shorter; none accepted is longer than no drafts."""
    found = [tpot_s(**GPT, **DRAFTS, accepted_tokens=each) for each in ("3", "1.5", "0")]
    assert found == sorted(found)
    assert found[0] < tpot_s(**GPT) < found[-1]


def test_a_published_acceptance_is_said() -> None:
    """Rows of a source that counts none are predicted with it, and their notes name it."""
    found = predict_row(row(**QWEN, **DRAFTS, source="inferencex"))
    assert found.status == "predicted"
    assert "2.39 of 3 drafts accepted, as published" in found.reason
    counted = predict_row(row(**QWEN, **DRAFTS, source="inferencex", accepted_tokens="2.39"))
    assert counted.tpot_s == found.tpot_s
    assert "published" not in counted.reason
