"""One configuration: layout, replicas and limits, ready to be forecast."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sizing.search.layout import Layout, decode_slots
from sizing.traffic.prefill import batch_s
from sizing.traffic.stage import Stage, Tandem

if TYPE_CHECKING:
    from sizing.plan import Inputs
    from sizing.search.step_models import StepModels

COMPANY = 1.5
"""Times as long a prompt may take in a full batch as alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """
    A configuration.

    Attributes:
        slots: sequences that fit a decode replica's KV cache.
        tandem: its queues.
    """

    layout: Layout
    slots: int
    tandem: Tandem

    @property
    def gpus(self) -> int:
        """GPUs of both pools."""
        prefill, decode = self.tandem.prefill.replicas, self.tandem.decode.replicas
        return prefill * self.layout.prefill_tp + decode * self.layout.decode_tp

    def __str__(self) -> str:
        """Write as `sizing predict` takes it."""
        prefill, decode = self.tandem.prefill.replicas, self.tandem.decode.replicas
        return (
            f"--prefill {prefill}xTP{self.layout.prefill_tp}"
            f" --decode {decode}xTP{self.layout.decode_tp}"
        )

    def limited(self, max_batch_size: int) -> Candidate:
        """Return the same with another limit on the decode batch."""
        stage = replace(self.tandem.decode, max_batch_size=max_batch_size)
        return replace(self, tandem=replace(self.tandem, decode=stage))

    def sized(self, prefill: int, decode: int) -> Candidate:
        """Return the same with other numbers of replicas."""
        tandem = replace(
            self.tandem,
            prefill=replace(self.tandem.prefill, replicas=prefill),
            decode=replace(self.tandem.decode, replicas=decode),
        )
        return replace(self, tandem=tandem)


def smallest(inputs: Inputs, layout: Layout, models: StepModels) -> Candidate:
    """Return one replica a pool, with the largest decode batch that fits memory and engine."""
    model = models.of(layout)
    budget = inputs.engine.max_batched_tokens
    stage = Stage(replicas=1, max_batch_size=1, max_batched_tokens=budget)
    tandem = Tandem(
        workload=inputs.scenario.workload, step_model=model, prefill=stage, decode=stage
    )
    slots = decode_slots(
        inputs, layout.decode_tp, context=tandem.context[0], deviation=tandem.context[1]
    )
    batch = prefill_batch(tandem)
    whole = replace(tandem, prefill=replace(stage, max_batch_size=batch))
    return Candidate(layout=layout, slots=slots, tandem=whole).limited(max(1, slots))


def prefill_batch(tandem: Tandem) -> int:
    """
    Prompts that a prefill step should hold.

        largest b with t(b) <= 1.5 t(1) and b E[n] <= budget      (docs/model.md, eq. L1)

    A prompt that saturates compute by itself gains nothing from company, and waits for it.
    """
    most = min(
        tandem.step_model.prefill.max_batch,
        int(tandem.prefill.max_batched_tokens // tandem.computed_tokens.mean()),
    )
    alone = batch_s(tandem, 1)
    batch = 1
    while batch < most and batch_s(tandem, batch + 1) <= COMPANY * alone:
        batch += 1
    return batch
