"""What `plan` and `predict` are computed from: a scenario, the catalogs, a calibration."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from minicluster.config import parse_scenario
from minicluster.errors import InputError
from minicluster.plan import Inputs
from sizing import catalog
from sizing.latency.calibration import read_calibration

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from minicluster.plan import Plan


def read_inputs(scenario: Path, overrides: list[str], calibration: Path | None) -> Inputs:
    """
    Read and resolve everything.

    Raises:
        InputError: anything missing, unknown or contradictory.
    """
    chosen = catalog.read_scenario(scenario, overrides)
    kinds = {
        found.name: found
        for name in chosen.search.gpus
        for found in (catalog.find_gpu(name, place=f"{scenario}: search.gpus"),)
    }
    chosen = replace(chosen, search=replace(chosen.search, gpus=tuple(kinds)))
    model, gpu, cluster, engine = catalog.resolve(chosen, str(scenario))
    return Inputs(
        scenario=chosen,
        model=model,
        gpu=gpu,
        cluster=cluster,
        engine=engine,
        calibration=None if calibration is None else read_calibration(calibration),
        other_gpus=tuple(found for name, found in kinds.items() if name != gpu.name),
    )


def with_overrides(plan: Plan, overrides: list[str], place: str) -> Plan:
    """
    Return a plan under another load or SLO; its pools stay.

    Raises:
        InputError: a key of what the plan deploys, or a value that cannot be.
    """
    for each in overrides:
        if each.partition("=")[0].strip().partition(".")[0] not in {"workload", "slo"}:
            raise InputError(
                "--set", each, "a key of [workload] or [slo]", "plan again to change the others"
            )
    if not overrides:
        return plan
    changed = parse_scenario(asdict(plan.inputs.scenario), overrides, place=place)
    return replace(plan, inputs=replace(plan.inputs, scenario=changed))


@contextmanager
def naming(scenario: Path) -> Iterator[None]:
    """Put the scenario's file before the key that an error names."""
    try:
        yield
    except InputError as error:
        place = f"{scenario}: {error.place}"
        raise InputError(place, error.value, error.expectation, error.way_out) from None
