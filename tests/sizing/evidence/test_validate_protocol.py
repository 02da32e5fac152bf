"""What is known of how rows were made."""

from __future__ import annotations

import pytest

from sizing.evidence.prediction import predict_row
from sizing.evidence.protocol import protocol_of, protocols, recipe_of
from sizing.evidence.row import MeasuredRow, row_from

CELLS = {
    "id": "one", "source": "blis", "model": "mistralai/Mistral-Nemo-Instruct-2407",
    "gpu": "h100-sxm", "engine": "vllm", "engine_version": "0.15.1", "weight_dtype": "bf16",
    "serving": "aggregated", "gpus": "2", "tp": "2", "load": "open", "requests_per_s": "2.5",
    "isl": "547", "osl": "248", "prefix_tokens": "100", "max_num_batched_tokens": "1024",
}  # fmt: skip


def row(**cells: str) -> MeasuredRow:
    return row_from(CELLS | cells, "rows.csv:2")


def test_a_row_is_a_stage_of_a_documented_run() -> None:
    """By source, lengths, load and rate; anything else says all there is in its columns."""
    found = protocol_of(row())
    assert found.prompts == 45
    for cells in (
        {"source": "here"}, {"isl": "548"}, {"osl": "9"}, {"requests_per_s": "3"},
        {"load": "closed", "concurrency": "4"},
    ):  # fmt: skip
        assert protocol_of(row(**cells)) is None


def test_only_the_first_stage_finds_the_cache_empty() -> None:
    """The second stage of a run sends the same prompts again."""
    for protocol in protocols():
        for run in protocol.stages_per_s:
            assert [protocol.cold(rate) for rate in run] == [
                protocol.prompts, *[0] * (len(run) - 1)
            ]  # fmt: skip


def test_prompts_that_come_again_are_served_sooner() -> None:
    """All but a first round find the whole prompt cached; elsewhere only the named prefix."""
    again, new = predict_row(row()), predict_row(row(source="here"))
    for name in ("ttft_s", "tpot_s"):
        known, fresh = getattr(again, name), getattr(new, name)
        assert known < fresh
    assert again.ttft_p99_s == pytest.approx(new.ttft_s, rel=0.5)


TRTLLM = {
    "source": "inferencex", "model": "meta-llama/Llama-3.1-70B", "gpu": "h200-sxm",
    "engine": "trtllm", "engine_version": "", "weight_dtype": "fp8", "load": "closed",
    "concurrency": "16", "isl": "1024", "osl": "1024", "prefix_tokens": "",
    "max_num_batched_tokens": "", "length_jitter": "0.2",
}  # fmt: skip


def test_a_recipe_is_that_of_its_loads_and_widths() -> None:
    """InferenceX lets prompts wait on fewer than eight GPUs at 1,024 in and out, nowhere else."""
    waits = []
    for cells in ({}, {"gpus": "8", "tp": "8"}, {"osl": "8192"}, {"source": "here"}):
        found = recipe_of(row(**TRTLLM | cells))
        waits.append(None if found is None else found.wait_steps)
    assert waits == [20, 0, 0, None]


def test_waiting_for_company_costs_its_steps() -> None:
    """TTFT is some twenty decode steps longer, TPOT hardly another."""
    patient, prompt = predict_row(row(**TRTLLM)), predict_row(row(**TRTLLM | {"osl": "1023"}))
    assert patient.ttft_s - prompt.ttft_s == pytest.approx(20 * patient.tpot_s, rel=0.35)
    assert patient.tpot_s == pytest.approx(prompt.tpot_s, rel=0.1)
