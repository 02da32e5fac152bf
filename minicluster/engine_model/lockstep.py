"""The data-parallel ranks of a group, whose steps begin and end together (eq. Q11)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minicluster.engine_model.replica import Replica

if TYPE_CHECKING:
    from collections.abc import Iterable


class Rank(Replica):
    """
    A replica whose steps wait for those of the other ranks of its group (docs/model.md, eq. Q11).

    The ranks meet at the experts of every layer, so all are in a step or none is: while one has
    work, the others do dummy steps. After each call that may begin a stretch, or end one earlier,
    `keep_in_step` must be called; an event at `end_s` must call `end_stretch` and `start_stretch`
    of all *ranks*, and `step_together`.

    Attributes:
        ranks: all of the group, this one included.

    Ignores: within a stretch, that another rank becomes the slowest one.
    """

    __slots__ = ("ranks",)

    ranks: tuple[Rank, ...]

    @property
    def steps(self) -> int:
        """Steps of the stretch in progress."""
        return self._steps

    def kv_received(self, request: int, now_s: float) -> None:
        """See `Replica`; the request joins where the whole group begins a step."""
        self.kv_arrived.add(request)
        if self.active:
            self._end_at_next_step(now_s)
        else:
            self.start_stretch(now_s)

    def pace(self) -> tuple[float, float, float]:
        """Return the seconds of the first step, and the two terms of eq. Q2 of all."""
        if self.scheduled_prefills:
            return self._seconds, self._seconds, 0.0
        return self._line_s + self._half_s, self._line_s, self._half_s

    def follow(self, start_s: float, steps: int, line_s: float, half_s: float) -> None:
        """Take the steps that the group takes: dummy ones, if there is nothing to compute."""
        if not self.active:
            self.active, self.start_s, self._used_end = True, start_s, self.used_blocks
        elif self.start_s < start_s:
            self._wait(start_s - self.start_s)
        self._line_s, self._half_s = line_s, half_s
        self._take(steps)

    def shorten(self, steps: int) -> None:
        """End the stretch after *steps* steps, as another rank does."""
        if steps != self._steps:
            self._take(steps)


def step_together(ranks: Iterable[Rank]) -> None:
    """Let ranks that have begun a stretch, and those without work, step as the slowest does."""
    working = [rank for rank in ranks if rank.active]
    if working:
        start_s = max(rank.start_s for rank in working)
        steps = min(rank.steps for rank in working)
        _, line_s, half_s = max(rank.pace() for rank in working)
        for rank in ranks:
            rank.follow(start_s, steps, line_s, half_s)


def keep_in_step(changed: Rank) -> None:
    """Begin the stretch of an idle group with that of one rank, or end it as early as that."""
    if not changed.active:
        return
    if all(rank.active for rank in changed.ranks):
        steps = changed.steps
        if not steps and any(rank.scheduled_prefills for rank in changed.ranks):
            steps = 1  # prompts that are scheduled are computed, though late (eq. Q9)
        for rank in changed.ranks:
            rank.shorten(steps)
    else:
        step_together(changed.ranks)
