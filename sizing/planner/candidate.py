"""One configuration: layout, replicas and limits, ready to be forecast."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sizing.planner.layout import Layout, decode_slots
from sizing.queueing.prefill import batch_s
from sizing.queueing.stage import PoolStage, TandemLoad

if TYPE_CHECKING:
    from minicluster.plan import Inputs
    from sizing.planner.evidence import StepErrors
    from sizing.planner.step_models import StepModels

COMPANY = 1.5
"""Times as long a prompt may take in a full batch as alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """
    A configuration.

    Attributes:
        slots: sequences that one batch of a decode (or mixed) replica has room for.
        tandem: its queues, one for each batch of a replica; where pools are mixed its decode stage
            stands for both.
    """

    layout: Layout
    slots: int
    tandem: TandemLoad

    @property
    def replicas(self) -> dict[str, int]:
        """Replicas by role."""
        sizes = {"prefill": self.tandem.prefill, "decode": self.tandem.decode}
        sizes["mixed"] = sizes["decode"]
        return {
            role: sizes[role].replicas // shape.lanes for role, shape in self.layout.shapes.items()
        }

    @property
    def sizes(self) -> tuple[int, int]:
        """Replicas as `sized` takes them: of prefill, 0 where pools are mixed, and of decode."""
        found = self.replicas
        return found.get("prefill", 0), found.get("decode") or found["mixed"]

    @property
    def gpus(self) -> int:
        """GPUs of all pools."""
        shapes = self.layout.shapes
        return sum(count * shapes[role].gpus for role, count in self.replicas.items())

    @property
    def gpus_by_kind(self) -> dict[str, int]:
        """GPUs of each kind."""
        found: dict[str, int] = {}
        for role, shape in self.layout.shapes.items():
            found[shape.gpu] = found.get(shape.gpu, 0) + self.replicas[role] * shape.gpus
        return found

    def __str__(self) -> str:
        """Write as `sizing predict` takes it."""
        shapes = self.layout.shapes
        several = len({shape.gpu for shape in shapes.values()}) > 1
        return " ".join(
            f"--{role} {count}x{shapes[role]}" + (f"@{shapes[role].gpu}" if several else "")
            for role, count in self.replicas.items()
        )

    def limited(self, max_batch_size: int) -> Candidate:
        """Return the same with another limit on the decode batch."""
        stage = replace(self.tandem.decode, max_batch_size=max_batch_size)
        return replace(self, tandem=replace(self.tandem, decode=stage))

    def sized(self, prefill: int, decode: int) -> Candidate:
        """Return the same with other numbers of replicas; *prefill* is 0 where pools are mixed."""
        first, last = self.layout.prefill or self.layout.decode, self.layout.decode
        tandem = replace(
            self.tandem,
            prefill=replace(self.tandem.prefill, replicas=max(1, prefill) * first.lanes),
            decode=replace(self.tandem.decode, replicas=decode * last.lanes),
        )
        return replace(self, tandem=tandem)

    def off_by(self, errors: StepErrors) -> Candidate:
        """Return the same with steps that take longer than the model says."""
        model = self.tandem.step_model.slowed(
            prefill=errors.prefill, decode=errors.decode, mixed=self.layout.prefill is None
        )
        return replace(self, tandem=replace(self.tandem, step_model=model))


def smallest(inputs: Inputs, layout: Layout, models: StepModels) -> Candidate:
    """Return one replica a pool, with the largest decode batch that fits memory and engine."""
    budget = inputs.engine.max_batched_tokens
    one = PoolStage(replicas=1, max_batch_size=1, max_batched_tokens=budget)
    local = 0 if layout.prefill is None else inputs.scenario.search.local_threshold_tokens or 0
    tandem = TandemLoad(
        workload=inputs.scenario.workload,
        step_model=models.of(layout),
        prefill=one,
        decode=one,
        local_threshold_tokens=local,
        routing=inputs.scenario.search.routing,
    )
    mean, deviation = tandem.context
    slots = decode_slots(inputs, layout.decode, context=mean, deviation=deviation)
    batch = 1 if layout.prefill is None else prefill_batch(tandem)
    whole = replace(tandem, prefill=replace(one, max_batch_size=batch))
    start = Candidate(layout=layout, slots=slots, tandem=whole).limited(max(1, slots))
    return start.sized(1, 1)


def prefill_batch(tandem: TandemLoad) -> int:
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
