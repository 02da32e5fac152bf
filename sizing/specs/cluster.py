"""The machines that may be used: nodes of equal GPUs and the links between them."""

from __future__ import annotations

from dataclasses import dataclass

from sizing.errors import InputError
from sizing.specs.checks import STRICT, not_negative, positive
from sizing.specs.gpu import Source


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """
    Nodes of equal GPUs.

    Attributes:
        gpu: catalog name.
        gpus_per_node: GPUs that share a host.
        gpus_per_hb_domain: GPUs joined by scale-up links; TP beyond it crosses the network.
        max_gpus: the budget.
        scale_out_bytes_per_s: network per GPU, one direction; `None`: the GPU's own entry.
        scale_out_latency_s: one hop between nodes.
        price_usd_per_gpu_hour: only where the scenario gives it.
    """

    __pydantic_config__ = STRICT

    name: str
    gpu: str
    gpus_per_node: int
    gpus_per_hb_domain: int
    max_gpus: int
    scale_out_bytes_per_s: float | None = None
    scale_out_latency_s: float | None = None
    price_usd_per_gpu_hour: float | None = None
    sources: tuple[Source, ...] = ()

    def __post_init__(self) -> None:
        """Check counts and that sizes nest."""
        positive(
            gpus_per_node=self.gpus_per_node,
            gpus_per_hb_domain=self.gpus_per_hb_domain,
            max_gpus=self.max_gpus,
            scale_out_bytes_per_s=self.scale_out_bytes_per_s,
            price_usd_per_gpu_hour=self.price_usd_per_gpu_hour,
        )
        not_negative(scale_out_latency_s=self.scale_out_latency_s)
        if self.gpus_per_hb_domain % self.gpus_per_node and (
            self.gpus_per_node % self.gpus_per_hb_domain
        ):
            raise InputError(
                "cluster.gpus_per_hb_domain",
                self.gpus_per_hb_domain,
                f"a multiple or a divisor of gpus_per_node = {self.gpus_per_node}",
            )
