"""Facts of docs/supported.md: what the catalogs hold, and how well each entry is measured."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sizing import catalog
from sizing.catalog import release

if TYPE_CHECKING:
    from collections.abc import Iterable

    from minicluster.specs.engine import EngineProfile
    from sizing.evidence.evidence import Evidence, HeldOutCoverage

ENOUGH_ROWS = 30
LEAST_INSIDE = 0.6
"""Rows, and share of them inside intervals learned without the entry, of one that is `measured`."""

GIB = 2**30
QUANTITIES = ("ttft", "tpot")


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """
    How well one GPU, engine or family of models is measured.

    Attributes:
        rows: measurements of it.
        error, inside: medians of the errors, and shares of rows within intervals learned without
            the entry, TTFT / TPOT; empty without rows.
        verdict: `measured`, `doubtful` or `not measured`.
    """

    rows: int
    error: str
    inside: str
    verdict: str


def facts(evidence: Evidence) -> dict[str, Any]:
    """Return the tables of the page."""
    held = {
        (each.split, each.name, each.quantity): each
        for each in evidence.left_out
        if each.of == "group"
    }
    families = defaultdict(list)
    for key, entry in catalog.models().items():
        families[entry.family or key].append(key)
    gpus = {name: entry.spec for name, entry in catalog.gpus().items()}
    return {
        "gpus": [
            (gpu, round(gpu.require("hbm_bytes") / GIB), _known(held, "gpu", name))
            for name, gpu in gpus.items()
            if gpu.kind == "gpu"
        ],
        "engines": [
            (profile, _known(held, "engine", name))
            for name, profile in sorted(_newest(catalog.engines()).items())
        ],
        "families": [
            (name, keys, _known(held, "family", name)) for name, keys in sorted(families.items())
        ],
        "enough_rows": ENOUGH_ROWS,
        "least_inside": LEAST_INSIDE,
    }


def _newest(profiles: Iterable[EngineProfile]) -> dict[str, EngineProfile]:
    ascending = sorted(profiles, key=lambda profile: release(profile.version))
    return {profile.name: profile for profile in ascending}


def _known(held: dict[tuple[str, str, str], HeldOutCoverage], split: str, name: str) -> Known:
    tried = [held[split, name, each] for each in QUANTITIES if (split, name, each) in held]
    if not tried:
        return Known(rows=0, error="", inside="", verdict="not measured")
    rows = max(each.rows for each in tried)
    enough = rows >= ENOUGH_ROWS and min(each.covered_fraction for each in tried) >= LEAST_INSIDE
    shown = {each.quantity: each for each in tried}
    cells = [shown.get(quantity) for quantity in QUANTITIES]
    return Known(
        rows=rows,
        error=" / ".join(f"{each.median_error:.0%}" if each else "none" for each in cells),
        inside=" / ".join(f"{each.covered_fraction:.0%}" if each else "none" for each in cells),
        verdict="measured" if enough else "doubtful",
    )
