"""One collective on one network: seconds, by which tiers, and what crossing the HB domain costs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from minicluster.errors import InputError
from minicluster.specs.checks import Count, Fraction, NotNegative, Options, choice
from sizing.latency.collectives import measured_s, point_to_point_s
from sizing.latency.communication import PATTERNS
from sizing.latency.tiered import TRAFFIC, ring_s, tiered_s

if TYPE_CHECKING:
    from minicluster.specs.gpu import CollectiveProtocol, MeasuredCollective
    from minicluster.specs.topology import Topology

TWICE = 2
"""Times the last measured size up to which a table is extended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question(Options):
    """
    A collective.

    Attributes:
        pattern: all-reduce, all-gather, reduce-scatter, all-to-all, point-to-point.
        group: GPUs that take part; 2 for point-to-point.
        stride: between neighbours of the group; the distance for point-to-point.
        size_bytes: as `Exchange.size_bytes`.
        sending_fraction: point-to-point: share of a unit's GPUs that send out of it at once.
        rail_only: no links between rails: what changes rail goes through an HB domain.
    """

    _NAMED: ClassVar[dict[str, str]] = {"size_bytes": "bytes"}

    pattern: Annotated[str, choice(*PATTERNS)]
    group: Count
    stride: Count = 1
    size_bytes: NotNegative
    sending_fraction: Fraction = 1.0
    rail_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveResult:
    """
    Seconds of a collective, and their terms.

    Attributes:
        seconds: by the table where the library was measured on such a group, else by formula;
            `basis` says which, `formula_s` is by formula in any case.
        spans: tier to how many of the units below the group has in one unit of it.
        meets_in: the outermost tier that it crosses.
        beyond_hb_domain_s: more than in one HB domain as wide as the group.
        bus_bytes_per_s: bytes that cross each GPU's link a second.
        libraries: seconds by each library that was measured on such a group and size.
        ring_s: as one flat ring; `None` for patterns that have none.
        chunk_bytes: of such a ring's messages: they shrink as it grows.
    """

    pattern: str
    group: int
    stride: int
    size_bytes: float
    seconds: float
    basis: str
    formula_s: float
    spans: dict[str, int]
    meets_in: str
    beyond_hb_domain_s: float
    bus_bytes_per_s: float
    libraries: dict[str, float]
    ring_s: float | None = None
    chunk_bytes: float | None = None


def answer(
    question: Question,
    topology: Topology,
    *,
    measured: tuple[MeasuredCollective, ...] = (),
    protocols: tuple[CollectiveProtocol, ...] = (),
    library: str | None = None,
) -> CollectiveResult:
    """
    Time a collective on a topology (docs/model.md, eq. H2, H3 and H4).

    Args:
        measured: tables of libraries on this GPU, points filled in.
        protocols: of the library, for the formula.
        library: whose table to read; `None`: the formula.

    Raises:
        InputError: a group wider than the network, or a library that was not measured here at all.
    """
    if question.pattern == "point-to-point":
        return _point_to_point(question, topology)
    known = sorted({table.library for table in measured})
    if library is not None and library not in known:
        raise InputError("--library", library, "one of " + ", ".join(known or ["(none)"]))
    size, pattern = question.size_bytes, question.pattern
    spans = topology.spans(question.group, question.stride)
    by_formula = 0.0
    if question.group > 1:
        by_formula = float(tiered_s(size, pattern, topology, spans, protocols))
        by_formula += _forward_s(question, topology, spans)
    found = {
        table.library: float(measured_s(size, table))
        for table in measured
        if _says(table, question, spans)
    }
    seconds, basis = by_formula, "formula"
    if library is not None and library in found and question.group > 1:
        seconds, basis = found[library], f"measured: {library}"
    beyond = 0.0
    if math.prod(spans[1:]) > 1:
        joined = (question.group, *(1 for _ in topology.tiers[1:]))
        beyond = by_formula - float(tiered_s(size, pattern, topology, joined, protocols))
    flat = None if pattern == "all-to-all" else float(ring_s(size, pattern, topology, spans))
    sent = TRAFFIC[pattern](question.group) * size
    crossed = [index for index, count in enumerate(spans) if count > 1] or [0]
    return CollectiveResult(
        pattern=pattern,
        group=question.group,
        stride=question.stride,
        size_bytes=size,
        seconds=seconds,
        basis=basis,
        formula_s=by_formula,
        spans=dict(zip([tier.name for tier in topology.tiers], spans, strict=True)),
        meets_in=topology.tiers[crossed[-1]].name,
        beyond_hb_domain_s=max(0.0, beyond),
        bus_bytes_per_s=sent / seconds if seconds > 0 else 0.0,
        libraries=found,
        ring_s=flat,
        chunk_bytes=size / question.group,
    )


def _says(table: MeasuredCollective, question: Question, spans: tuple[int, ...]) -> bool:
    """
    Say whether a table was measured on such a group, neighbours in as many HB domains.

    It says nothing of more bytes than twice its last size, unless it knows the plateau.
    """
    return (
        table.pattern == question.pattern
        and table.gpus == question.group
        and table.domains == math.prod(spans[1:])
        and question.stride == 1
        and (
            table.bus_bytes_per_s is not None or question.size_bytes <= TWICE * table.size_bytes[-1]
        )
    )


def _forward_s(question: Question, topology: Topology, spans: tuple[int, ...]) -> float:
    """
    Return what changing rails inside the HB domain adds without links between rails.

        (1 - 1/k_1) S (n - k_1)/n / (B_1 e_1) of an all to all (docs/model.md, eq. H5)
    """
    domains = math.prod(spans[1:])
    if not question.rail_only or question.pattern != "all-to-all" or domains == 1:
        return 0.0
    total, inner = math.prod(spans), spans[0]
    crossing = question.size_bytes * (total - inner) / total * (1 - 1 / inner)
    return crossing / topology.tiers[0].achieved_bytes_per_s()


def _point_to_point(question: Question, topology: Topology) -> CollectiveResult:
    """Time one send from the first GPU to the one *stride* further on."""
    size, distance = question.size_bytes, question.stride
    index = topology.holding(distance + 1)
    tier, domain = topology.tiers[index], topology.tiers[0]
    sending = question.sending_fraction
    seconds = float(point_to_point_s(size, topology, distance, sending_fraction=sending))
    inside = (domain.latency_s + size / domain.achieved_bytes_per_s()) if size else 0.0
    basis = "formula"
    if index and question.rail_only and distance % domain.gpus:
        seconds += inside
        basis = "formula: over the rail, then through the HB domain"
    return CollectiveResult(
        pattern=question.pattern,
        group=2,
        stride=distance,
        size_bytes=size,
        seconds=seconds,
        basis=basis,
        formula_s=seconds,
        spans={each.name: 2 if each == tier else 1 for each in topology.tiers},
        meets_in=tier.name,
        beyond_hb_domain_s=max(0.0, seconds - inside) if index else 0.0,
        bus_bytes_per_s=size / seconds if seconds > 0 else 0.0,
        libraries={},
    )
