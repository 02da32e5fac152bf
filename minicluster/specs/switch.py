"""One model of network switch."""

from __future__ import annotations

from dataclasses import dataclass

from minicluster.specs.checks import STRICT, positive
from minicluster.specs.gpu import NumberSource


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchSpec:
    """
    One file of `configs/switches`.

    Attributes:
        ports: at the speed below; its radix.
        port_gbit_per_s: of one port, one way, in gigabits as switches are sold.
        buffer_bytes: packet memory of one chip; `None`: unknown.
        power_w: with all ports in use, transceivers not counted; `None`: unknown.
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
        """Of all ports together, one way."""
        return self.ports * self.port_gbit_per_s * 1e9 / 8
