"""A plugin for vLLM's processes: planned cores, a log of steps, an end with the replica."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from functools import partialmethod
from multiprocessing import current_process
from pathlib import Path
from typing import Any

import torch

from minicluster.workload.engine_steps import EngineStep
from serving.cluster.processes import KEEP_AFFINITY

PROGRESS_DELAY_US = 1_000
"""Sleep of NIXL's progress thread while no transfer runs; an event wakes it at once."""

BUSY_LOOP_S = 0.0
"""Time that vLLM's processes spin for a message before they sleep; vLLM's default: 1."""

RECHECK_MS = 1
"""
Longest sleep until they check again. The wake-up that comes with a message is often lost (vLLM
knows, and checks again after 5 s, which looked like KV transfers that stall for 5, 10, 30 s).
"""

NICENESS = 10
"""Niceness of a worker, against 0 of the processes that carry its messages."""

REPLICA = "MINICLUSTER_REPLICA"
"""Environment variable: the process id of the replica that starts an engine."""

PARENT_POLL_S = 0.5


def keep_planned_cores() -> None:
    """
    Keep vLLM's processes to the cores of the plan (docs/adr/0101), and end them with the replica.

    On a CPU vLLM's NIXL worker moves itself to the last core of the NUMA node, so that two
    engines on two cores end up on one. NIXL's transfer thread never sleeps: it shares the engine's
    core and took half of it. And vLLM's processes wait for one another by spinning for up to a
    second, then by sleeping for up to five: spinning saves microseconds on cores of their own, and
    takes the time of the awaited process on shared ones.
    """
    end_with_replica()
    share_experts_on_cpu()
    if "EngineCore" in current_process().name:
        count_recomputed_prompts()
        log_steps()
    if os.environ.get(KEEP_AFFINITY) != "1":
        return
    # vLLM would set it before it imports NIXL; this plugin imports NIXL earlier.
    os.environ.setdefault("UCX_RCACHE_MAX_UNRELEASED", "1024")
    from nixl import _api as nixl  # noqa: PLC0415  (loaded inside vLLM only)
    from vllm.distributed.device_communicators import shm_broadcast  # noqa: PLC0415
    from vllm.platforms.cpu import CpuPlatform  # noqa: PLC0415

    # It asks the platform for the cores of each node; without any it keeps the affinity.
    CpuPlatform.discover_numa_topology = classmethod(_no_nodes)
    shm_broadcast.SHM_READER_RECHECK_INTERVAL_MS = RECHECK_MS
    waiting = shm_broadcast.SpinCondition
    waiting.__init__ = partialmethod(waiting.__init__, busy_loop_s=BUSY_LOOP_S)
    if not isinstance(nixl.nixlBind, _SleepingProgress):
        nixl.nixlBind = _SleepingProgress(nixl.nixlBind)
    if current_process().name.startswith("VllmWorker"):
        lower_worker_priority()


def count_recomputed_prompts() -> None:
    """
    Correct the scheduler's statistics of a prompt whose KV cache was lost on its way.

    vLLM 0.29 counts it as fetched, whatever becomes of the transfer, and reports its failure only
    in a counter of the engine. `serving.replicas.vllm` reads the statistics.
    """
    from vllm.v1.core.sched.scheduler import Scheduler  # noqa: PLC0415  (loaded inside vLLM only)

    update = Scheduler._update_requests_with_invalid_blocks  # noqa: SLF001

    def corrected(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        updated = update(self, *args, **kwargs)
        for name in updated[0]:
            request = self.requests[name]
            if request.prefill_stats is not None:
                request.prefill_stats.set(request.num_prompt_tokens, request.num_computed_tokens, 0)
        return updated

    Scheduler._update_requests_with_invalid_blocks = corrected  # noqa: SLF001


def lower_worker_priority() -> None:
    """
    Lower the priority of a worker against the processes that carry tokens, inside this cluster.

    A worker computes as long as there is work; the processes that route requests and forward tokens
    need little time, but at once. Where the kernel groups processes by session or control group,
    niceness counts inside the group only, and the group keeps its share of the machine. Elsewhere a
    nice worker would yield to every process of the machine, so it keeps its priority.
    """
    if niceness_is_local(
        Path("/proc/sys/kernel/sched_autogroup_enabled"), Path("/proc/self/cgroup")
    ):
        os.nice(NICENESS)


def niceness_is_local(autogroup: Path, cgroup: Path) -> bool:
    """
    Return whether niceness compares only the processes of one session or control group.

    Args:
        autogroup: the kernel's switch, 0 or 1 (sched(7)).
        cgroup: the control groups of this process (cgroups(7)).
    """
    try:
        grouped = [line.split(":", 2) for line in cgroup.read_text(encoding="ascii").split()]
        in_group = any(
            path != "/" for _, names, path in grouped if not names or "cpu" in names.split(",")
        )
        return in_group or autogroup.read_text(encoding="ascii").strip() == "1"
    except (OSError, ValueError):
        return False


def end_with_replica() -> None:
    """
    Kill this engine process when the replica that started it is gone.

    vLLM's workers end with their engine, but an engine does not notice that its replica was
    killed: it would keep its memory, and the ports that the next replica waits for.
    """
    replica = os.environ.get(REPLICA)
    if replica is None or os.getppid() != int(replica):
        return  # the replica itself, or a worker
    threading.Thread(target=_watch_parent, args=(int(replica),), daemon=True).start()


def _watch_parent(replica: int) -> None:
    while os.getppid() == replica:  # an orphan gets another parent
        time.sleep(PARENT_POLL_S)
    os.kill(os.getpid(), signal.SIGKILL)


def _no_nodes(_platform: type) -> list[list[int]]:
    return []


class _SleepingProgress:
    """
    Replaces NIXL's bindings: agents get a progress thread that sleeps.

    The C++ configuration has a delay for it, which NIXL's Python code sets to zero without an
    option (nixl 1.3.2, _api.py).
    """

    def __init__(self, bindings: Any) -> None:  # noqa: ANN401
        self._bindings = bindings

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._bindings, name)

    def nixlAgent(self, name: str, config: Any) -> Any:  # noqa: ANN401, N802  (NIXL's name)
        """Make an agent whose progress thread sleeps."""
        config.pthrDelay = PROGRESS_DELAY_US
        return self._bindings.nixlAgent(name, config)


MOST_STEPS = 50_000
"""Steps that an engine remembers: a quarter of an hour of the shortest ones."""

ASK = "minicluster_steps"
"""Name of the method of vLLM's engine core that `log_steps` adds."""


class StepLog:
    """
    The last steps of one engine.

    A step lasts from its begin to its end. It begins when the step before has ended, if there was
    work left then, and when it is scheduled otherwise. So the seconds of a busy engine add up to
    the clock's, whatever vLLM overlaps.
    """

    def __init__(self) -> None:
        self._rows: deque[EngineStep] = deque(maxlen=MOST_STEPS)
        self._scheduled_s: dict[int, float] = {}
        self._last_end_s = 0.0
        self._work_left = False

    def scheduled(self, output: Any) -> None:  # noqa: ANN401
        """Note when a step was scheduled."""
        if output.total_num_scheduled_tokens:
            self._scheduled_s[id(output)] = time.monotonic()

    def ended(self, output: Any, *, work_left: bool) -> None:  # noqa: ANN401
        """Note the end of a step."""
        begin_s = self._scheduled_s.pop(id(output), None)
        if begin_s is None:
            return
        if self._work_left or begin_s < self._last_end_s:
            begin_s = self._last_end_s
        self._last_end_s, self._work_left = time.monotonic(), work_left
        seconds = self._last_end_s - begin_s
        self._rows.append(EngineStep(time.time(), seconds, *_content(output)))

    def between(self, begin_s: float, end_s: float) -> list[EngineStep]:
        """Return the steps that ended in an interval of Unix time."""
        return [row for row in self._rows if begin_s <= row.end_unix_s < end_s]


def _content(output: Any) -> tuple[int, int, int, int, int, int]:  # noqa: ANN401
    """Return what `EngineStep` says of a step, from its prompts on."""
    requests = tokens = pairs = sequences = context = 0
    cached = output.scheduled_cached_reqs
    computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    computed |= zip(cached.req_ids, cached.num_computed_tokens, strict=True)
    for name, count in output.num_scheduled_tokens.items():
        before = computed[name]
        if count == 1:
            sequences += 1
            context += before + 1
        else:
            requests += 1
            tokens += count
            pairs += count * before + count * (count + 1) // 2
    return requests, tokens, pairs, sequences, context, len(output.scheduled_new_reqs)


def log_steps() -> None:
    """Have the engine core of this process keep a `StepLog`, and answer `ASK` with parts of it."""
    from vllm.v1.core.sched.scheduler import Scheduler  # noqa: PLC0415  (loaded inside vLLM only)
    from vllm.v1.engine.core import EngineCore  # noqa: PLC0415

    log = StepLog()
    schedule, update = Scheduler.schedule, Scheduler.update_from_output

    def scheduling(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        output = schedule(self, *args, **kwargs)
        log.scheduled(output)
        return output

    def updating(self: Any, output: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        answer = update(self, output, *args, **kwargs)
        # Requests that wait for their KV cache are elsewhere: they give the engine nothing to do.
        log.ended(output, work_left=bool(self.running or self.waiting))
        return answer

    Scheduler.schedule, Scheduler.update_from_output = scheduling, updating
    setattr(EngineCore, ASK, lambda _core, begin_s, end_s: log.between(begin_s, end_s))


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
        return [_all_gatherv(self, part, dim, sizes) for part in given]
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
    rows = sizes or [summed.shape[0] // self.world_size] * self.world_size
    return summed.split(rows)[self.rank_in_group].contiguous()
