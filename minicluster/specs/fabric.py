"""Switches, and how a network is built of them: its kind, its switches tier by tier, its spares."""

from __future__ import annotations

from dataclasses import dataclass

from minicluster.errors import InputError
from minicluster.specs.checks import STRICT, not_negative, one_of, positive
from minicluster.specs.gpu import NumberSource


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchSpec:
    """
    One file of `configs/switches`.

    Attributes:
        ports: number of ports at the speed below; its radix.
        port_gbit_per_s: speed of one port, one way, in gigabits as switches are sold.
        buffer_bytes: packet memory of one chip; `None`: unknown.
        power_w: power with all ports in use, transceivers not counted; `None`: unknown.
    """

    __pydantic_config__ = STRICT

    name: str
    vendor: str
    ports: int
    port_gbit_per_s: float
    buffer_bytes: float | None = None
    power_w: float | None = None
    sources: tuple[NumberSource, ...] = ()

    def __post_init__(self) -> None:
        """Check numbers."""
        positive(
            ports=self.ports,
            port_gbit_per_s=self.port_gbit_per_s,
            buffer_bytes=self.buffer_bytes,
            power_w=self.power_w,
        )

    @property
    def bytes_per_s(self) -> float:
        """Bandwidth of all ports together, one way."""
        return self.ports * self.port_gbit_per_s * 1e9 / 8


KINDS = ("clos", "rail-optimised", "rail-only")


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchTierSpec:
    """
    `[[fabric.switches]]`: the switches that join the units below into one unit of a tier.

    Attributes:
        tier: name of the tier of `[[tiers]]` whose units the switches make.
        model: name in configs/switches.
        down: ports towards the GPUs that are cabled, of one switch.
        up: ports towards the next tier, of one switch; 0 at the top.
        spares: switches of a unit beyond those that the traffic needs.
        copper_down: the links below it are copper, without transceivers.
    """

    __pydantic_config__ = STRICT

    tier: str
    model: str
    down: int
    up: int = 0
    spares: int = 0
    copper_down: bool = False

    def __post_init__(self) -> None:
        """Check counts."""
        positive(**{f"fabric.switches.{self.tier}.down": self.down})
        not_negative(
            **{
                f"fabric.switches.{self.tier}.up": self.up,
                f"fabric.switches.{self.tier}.spares": self.spares,
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricSpec:
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

    __pydantic_config__ = STRICT

    kind: str
    radix: int
    rails: int
    flows: int = 1
    switches: tuple[SwitchTierSpec, ...] = ()

    def __post_init__(self) -> None:
        """Check kind and counts."""
        one_of(KINDS, **{"fabric.kind": self.kind})
        positive(
            **{
                "fabric.radix": self.radix,
                "fabric.rails": self.rails,
                "fabric.flows": self.flows,
            }
        )
        if any(tier.up == 0 for tier in self.switches[:-1]):
            raise InputError("fabric.switches.up", 0, "uplinks below the top tier")


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureSpec:
    """
    `[failures]` of a cluster preset: mean times between failures and until repair.

    Attributes:
        gpu_mtbf_s: mean time between failures that stop a job, per GPU.
        node_repair_s: until a failed node serves again.
        switch_mtbf_s: per switch; absent: switches are not counted.
        domains: tiers whose units fail as one.
    """

    __pydantic_config__ = STRICT

    gpu_mtbf_s: float
    node_repair_s: float
    switch_mtbf_s: float | None = None
    domains: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check times."""
        positive(
            **{
                "failures.gpu_mtbf_s": self.gpu_mtbf_s,
                "failures.node_repair_s": self.node_repair_s,
                "failures.switch_mtbf_s": self.switch_mtbf_s,
            }
        )
