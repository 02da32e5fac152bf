"""Expert parallelism on a CPU: what vLLM 0.29 has on GPUs only, for tests and demonstrations."""

from __future__ import annotations

from typing import Any

import torch


def share_experts_on_cpu() -> None:
    """
    Let data-parallel ranks on CPUs share their experts.

    Around its experts vLLM gathers the tokens of all ranks and scatters their sums, as many of each
    rank as it has; its CPU communicator has neither collective (`all_gatherv` and `reduce_scatterv`
    are not implemented). And its CPU kernel takes the numbers of all experts for those of the
    rank's own, and reads beyond them.
    """
    from vllm.distributed.device_communicators.cpu_communicator import (  # noqa: PLC0415
        CpuCommunicator,
    )
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import (  # noqa: PLC0415
        CPUUnquantizedExperts as Experts,
    )

    CpuCommunicator.all_gatherv = _all_gatherv
    CpuCommunicator.reduce_scatterv = _reduce_scatterv
    apply, select = Experts.apply, Experts._select_experts  # noqa: SLF001

    def applied(self: Any, **arguments: Any) -> torch.Tensor:  # noqa: ANN401
        """Keep the map of experts for the selection, which is not given it."""
        self.expert_map = arguments["expert_map"]
        output: torch.Tensor = apply(self, **arguments)
        return output

    def selected(self: Any, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ANN401
        weights, experts = select(self, *arguments)
        return own_experts(weights, experts, self.expert_map)

    Experts.apply, Experts._select_experts = applied, selected  # noqa: SLF001


def own_experts(
    weights: torch.Tensor, experts: torch.Tensor, expert_map: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Return weights and experts of each token on one rank; those of others weigh nothing.

    Args:
        weights: tokens x experts per token.
        experts: their numbers among all experts, of the same shape.
        expert_map: number on this rank of each of all experts, -1: on another rank; `None`: this
            rank has all of them.
    """
    if expert_map is None:
        return weights, experts
    local = expert_map[experts.long()]
    return weights.masked_fill(local < 0, 0.0), local.clamp(min=0).to(experts.dtype)


def _all_gatherv(
    self: Any,  # noqa: ANN401
    given: torch.Tensor | list[torch.Tensor],
    dim: int = 0,
    sizes: list[int] | None = None,
) -> torch.Tensor | list[torch.Tensor]:
    """Gather the rows of all ranks, of which *sizes* has the numbers, padded to the most on one."""
    if isinstance(given, list):
        return [_all_gatherv(self, each, dim, sizes) for each in given]
    sizes = sizes or [given.shape[0]] * self.world_size
    padded = given.new_zeros((max(sizes), *given.shape[1:]))
    padded[: given.shape[0]] = given
    gathered = self.all_gather(padded, dim).split(max(sizes))
    return torch.cat([rows[:size] for rows, size in zip(gathered, sizes, strict=True)])


def _reduce_scatterv(
    self: Any,  # noqa: ANN401
    given: torch.Tensor,
    dim: int = 0,  # noqa: ARG001  (vLLM calls it with rows only)
    sizes: list[int] | None = None,
) -> torch.Tensor:
    """Return this rank's rows of the sum over all ranks; *sizes* has the number of each rank's."""
    summed = self.all_reduce(given.contiguous())
    each = sizes or [summed.shape[0] // self.world_size] * self.world_size
    return summed.split(each)[self.rank_in_group].contiguous()
