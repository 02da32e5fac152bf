"""Protocols of sources: how rows were measured, beyond their columns."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from minicluster.config import parse, read_toml
from minicluster.specs.checks import Spec
from minicluster.specs.gpu import NumberSource
from sizing.catalog import configs

if TYPE_CHECKING:
    from sizing.evidence.row import MeasuredRow

FILE = "validation/protocols.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementProtocol(Spec):
    """
    One workload that a source ran.

    Attributes:
        prompts: different ones; they are sent in turn, again and again, so that all but the first
            round finds them whole in the prefix cache.
        stages_per_s: arrival rates of runs, each in stages, one after the other.
        stage_s: how long one lasts.
        max_batch_size: sequences of a step.
    """

    source: str
    input_tokens: int
    output_tokens: int
    prompts: int
    stages_per_s: tuple[tuple[float, ...], ...]
    stage_s: float
    max_batch_size: int

    def cold(self, requests_per_s: float) -> int:
        """Prompts that a stage of this rate is the first to send."""
        return self.prompts if any(run[0] == requests_per_s for run in self.stages_per_s) else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe(Spec):
    """
    Settings with which a source started an engine.

    Attributes:
        input_tokens, output_tokens: of this load only; `None`: of any.
        tp_below: of narrower replicas only; `None`: of any.
        token_budget: tokens of a step.
        wait_steps: most steps that prompts wait for others while sequences decode.
        wait_fraction: share of the token budget that, once filled, ends the wait.
    """

    source: str
    engine: str
    model: str
    input_tokens: int | None = None
    output_tokens: int | None = None
    tp_below: int | None = None
    token_budget: int
    wait_steps: int = 0
    wait_fraction: float = 0.0

    def made(self, row: MeasuredRow) -> bool:
        """Say whether an aggregated row was measured by this protocol."""
        return (
            (self.source, self.engine, self.model) == (row.source, row.engine.lower(), row.model)
            and self.input_tokens in (None, row.isl)
            and self.output_tokens in (None, row.osl)
            and (self.tp_below is None or row.groups[0].slicing.tp < self.tp_below)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Protocols(Spec):
    """The file."""

    workloads: tuple[MeasurementProtocol, ...]
    recipes: tuple[Recipe, ...]
    sources: tuple[NumberSource, ...]


@cache
def _protocols() -> _Protocols:
    return parse(_Protocols, read_toml(configs() / FILE), place=FILE)


def protocols() -> tuple[MeasurementProtocol, ...]:
    """Return every workload that is known."""
    return _protocols().workloads


def protocol_of(row: MeasuredRow) -> MeasurementProtocol | None:
    """Return the workload that an open row is a stage of; `None`: its columns say everything."""
    for each in protocols():
        rates = {rate for run in each.stages_per_s for rate in run}
        if (row.source, row.isl, row.osl, row.load) == (
            each.source, each.input_tokens, each.output_tokens, "open",
        ) and row.amount in rates:  # fmt: skip
            return each
    return None


def recipe_of(row: MeasuredRow) -> Recipe | None:
    """Return the settings of an aggregated row's engine; `None`: unknown."""
    return next((each for each in _protocols().recipes if each.made(row)), None)
