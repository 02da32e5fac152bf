"""The steps of a vLLM engine as its scheduler sees them."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from minicluster.workload.engine_steps import EngineStep

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
