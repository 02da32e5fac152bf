"""Switches, and how a network is built of them: its kind, its switches tier by tier, its spares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from minicluster.errors import InputError
from minicluster.specs.checks import Count, Positive, Spec, Whole, choice
from minicluster.specs.gpu import NumberSource


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchSpec(Spec):
    """
    One file of `configs/switches`.

    Attributes:
        ports: number of ports at the speed below; its radix.
        port_gbit_per_s: speed of one port, one way, in gigabits as switches are sold.
    """

    name: str
    vendor: str
    ports: Count
    port_gbit_per_s: Positive
    buffer_bytes: Positive | None = None
    power_w: Positive | None = None
    sources: tuple[NumberSource, ...] = ()


KINDS = ("clos", "rail-optimised", "rail-only")


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchTierSpec(Spec):
    """
    `[[fabric.switches]]`: the switches that join the units below into one unit of a tier.

    Attributes:
        tier: name of the tier of `[[tiers]]` whose units the switches make.
        down: ports towards the GPUs that are cabled, of one switch.
        up: ports towards the next tier, of one switch; 0 at the top.
        spares: switches of a unit beyond those that the traffic needs.
        copper_down: the links below it are copper, without transceivers.
    """

    _TABLE: ClassVar[str] = "fabric.switches.{0.tier}"

    tier: str
    model: str
    down: Count
    up: Whole = 0
    spares: Whole = 0
    copper_down: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricSpec(Spec):
    """
    `[fabric]` of a cluster preset.

    Attributes:
        kind: any-to-any tree (`clos`), the same with the leaves sorted by rail
            (`rail-optimised`), or a tree a rail with none between rails (`rail-only`).
        radix: ports of a switch, where all are alike.
        rails: NICs of an HB domain, each on a rail of its own; GPU i of a domain has rail i.
        flows: flows over which one pair of GPUs spreads its bytes.
        switches: as built, from the leaf; empty: the smallest full-bisection tree.
    """

    _TABLE: ClassVar[str] = "fabric"

    kind: Annotated[str, choice(*KINDS)]
    radix: Count
    rails: Count
    flows: Count = 1
    switches: tuple[SwitchTierSpec, ...] = ()

    def _check(self) -> None:
        if any(tier.up == 0 for tier in self.switches[:-1]):
            raise InputError("fabric.switches.up", 0, "uplinks below the top tier")


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureSpec(Spec):
    """
    `[failures]` of a cluster preset: mean times between failures and until repair.

    Attributes:
        gpu_mtbf_s: mean time between failures that stop a job, per GPU.
        node_repair_s: until a failed node serves again.
        switch_mtbf_s: per switch; absent: switches are not counted.
        domains: tiers whose units fail as one.
    """

    _TABLE: ClassVar[str] = "failures"

    gpu_mtbf_s: Positive
    node_repair_s: Positive
    switch_mtbf_s: Positive | None = None
    domains: tuple[str, ...] = ()
