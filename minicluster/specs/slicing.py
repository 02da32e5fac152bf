"""Parallelism of one replica: how its GPUs share a model."""

from __future__ import annotations

from dataclasses import dataclass

from minicluster.errors import InputError
from minicluster.specs.checks import Count, Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Slicing(Spec):
    """
    Tensor, pipeline, expert and data parallelism of one replica.

    A pipeline stage is `tp * dp` GPUs: attention is sliced `tp` ways and copied `dp` times, each
    copy with its own requests and KV cache. The routed experts of the stage lie on all its GPUs:
    in `ep` groups of whole experts, each expert sliced `tp * dp / ep` ways.

    Attributes:
        tp: tensor-parallel degree of attention and dense layers.
        pp: pipeline stages.
        ep: expert-parallel degree; 1: every expert is sliced over the whole stage.
        dp: data-parallel copies of attention.
    """

    tp: Count = 1
    pp: Count = 1
    ep: Count = 1
    dp: Count = 1

    def _check(self) -> None:
        if (self.tp * self.dp) % self.ep:
            raise InputError("ep", self.ep, f"a divisor of tp x dp = {self.tp * self.dp}")

    def __str__(self) -> str:
        """Write as `sizing predict` takes it: `TP4xPP2`; degrees of 1 are left out, but for TP."""
        degrees = (("PP", self.pp), ("DP", self.dp), ("EP", self.ep))
        return f"TP{self.tp}" + "".join(f"x{name}{n}" for name, n in degrees if n > 1)

    @property
    def gpus(self) -> int:
        """GPUs of the replica."""
        return self.tp * self.dp * self.pp

    @property
    def moe_tp(self) -> int:
        """Ways that one expert is sliced."""
        return self.tp * self.dp // self.ep

    @property
    def routes_tokens(self) -> bool:
        """Copies of attention send their tokens to ranks that hold whole experts."""
        return self.dp > 1 and self.ep > 1


def stage_layers(num_layers: int, pp: int) -> list[int]:
    """
    Deal layers out over *pp* stages as vLLM does: what is left goes to the last but one, backwards.

    Source:
        vLLM 0.29.0 distributed/utils.py, get_pp_indices: the first and last stage also hold tables.
    """
    layers = [num_layers // pp] * pp
    for extra in range(num_layers % pp):
        layers[max(0, pp - 2 - extra)] += 1
    return layers
