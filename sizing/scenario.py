"""A scenario with everything that it names: what all questions are asked about."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from minicluster.config import scenario_tables
from minicluster.pages.shown import Shown
from minicluster.plan import Inputs
from sizing import catalog
from sizing.catalog.scenario import scenario_from

if TYPE_CHECKING:
    from pathlib import Path

    from minicluster.config import Overrides
    from minicluster.specs.calibration import CalibrationSpec
    from minicluster.specs.scenario import ScenarioSpec

LENGTHS = "integer or table"
"""Type of the keys whose own keys follow them in the schema."""

CLASSES = "workload.classes"
"""Key whose value is a list of tables."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scenario(Inputs, Shown):
    """
    Model, GPUs, load and SLO, with the catalog's numbers for each: what questions are asked about.

    Attributes:
        scenario: what was asked for; its `workload`, `slo`, `engine`, `cluster` and `search` have
            the keys of the file (docs/schema.md), in seconds, tokens, bytes and US dollars.
        model, gpu, cluster, engine: entries of the catalogs that it names.
        calibration: step times measured on this machine; `None`: they are computed.

    Example:
        >>> chat = Scenario.load("llama-3.1-8b-h100", {"workload.requests_per_s": 50})
        >>> chat.with_({"slo.ttft_s": 0.5}).scenario.slo.ttft_s
        0.5
    """

    @classmethod
    def load(
        cls, name: str | Path, overrides: Overrides = (), calibration: Path | None = None
    ) -> Scenario:
        """
        Read a scenario with its catalog entries and its calibration.

        Args:
            name: TOML file, or a shipped scenario such as `llama-3.1-70b-h100`.
            overrides: values by dotted key, such as `{"workload.requests_per_s": 50}`; `None`
                takes a key away, so that its default holds.
            calibration: file of `sizing calibrate`.

        Raises:
            InputError: anything missing, unknown or contradictory.
        """
        measured = None
        if calibration is not None:
            from sizing.latency.calibration import read_calibration  # noqa: PLC0415

            measured = read_calibration(calibration)
        return cls.of(catalog.read_scenario(name, overrides), str(name), measured)

    @classmethod
    def of(cls, chosen: ScenarioSpec, place: str, measured: CalibrationSpec | None) -> Scenario:
        """Look up what a parsed scenario names; raises as `load`, naming *place*."""
        found = catalog.inputs_of(chosen, place, calibration=measured)
        return cls(**{each.name: getattr(found, each.name) for each in fields(found)})

    def with_(self, overrides: Overrides) -> Scenario:
        """
        Return the same scenario with some keys changed, as `load` takes them.

        Raises:
            InputError: an unknown key or an impossible value.
        """
        changed = scenario_from(scenario_tables(self.scenario), overrides, place="scenario")
        return Scenario.of(changed, "scenario", self.calibration)

    def set_keys(self) -> dict[str, Any]:
        """Return the keys of the scenario file that are not at their defaults, and their values."""
        from sizing.catalog.schema import scenario_keys  # noqa: PLC0415  (plans never ask)

        named = (key for key in scenario_keys() if key.type != LENGTHS)
        inside = (key for key in named if not key.key.startswith(f"{CLASSES}."))
        values = ((key, value_of(self.scenario, key.key)) for key in inside)
        found = {
            key.key: value for key, value in values if value is not None and value != key.default
        }
        if CLASSES in found:
            classes = scenario_tables(self.scenario)["workload"]["classes"]
            found[CLASSES] = [_set(each) for each in classes]
        if CLASSES in found or self.scenario.workload.has_users:
            del found["workload.requests_per_s"]
        return found

    def to_toml(self) -> str:
        """Write the scenario file: every key that is not at its default, a table a paragraph."""
        tables: list[tuple[str, list[str]]] = []
        for key, value in self.set_keys().items():
            table, _, name = key.partition(".")
            if key == CLASSES:
                tables += [(f"[[{key}]]", [_line(*each) for each in own.items()]) for own in value]
                continue
            if not tables or tables[-1][0] != f"[{table}]":
                tables.append((f"[{table}]", []))
            tables[-1][1].append(_line(name, value))
        return "\n".join(f"{head}\n{''.join(lines)}" for head, lines in tables)

    def __eq__(self, other: object) -> bool:
        """Compare by value, also with the inputs that a plan's file has."""
        return isinstance(other, Inputs) and asdict(self) == asdict(other)

    __hash__ = Inputs.__hash__


def value_of(scenario: ScenarioSpec, key: str) -> object:
    """
    Return the value of a dotted key, in which a number stands for a place in a list.

    It is `None` also inside lengths that classes have in its place.
    """
    found: Any = scenario
    for name in key.split("."):
        if found is not None:
            found = found[int(name)] if name.isdigit() else getattr(found, name)
    return found


def _set(table: dict[str, Any]) -> dict[str, Any]:
    """Leave out keys without a value, also in tables inside, and zeros of a class's own keys."""
    inner = {k: _set(v) if isinstance(v, dict) else v for k, v in table.items()}
    unset: tuple[object, ...] = (None, {}, 0) if "users" in inner else (None, {})
    return {k: v for k, v in inner.items() if v not in unset}


def _line(key: str, value: object) -> str:
    return f"{key} = {_toml(value)}\n"


def _toml(value: object) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(k)} = {_toml(v)}" for k, v in value.items()) + " }"
    return json.dumps(value)
