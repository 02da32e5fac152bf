"""The data-parallel ranks of a group, whose steps begin and end together (eq. Q11)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minicluster.engine_model.replica import Replica

if TYPE_CHECKING:
    from collections.abc import Iterable


class Stretch:
    """
    Steps that a rank would do by itself, or that all ranks of its group do.

    Attributes:
        start_s: begin of the first.
        steps: their number.
        line_s: with *half_s* the terms of eq. Q2; those of a step that computes prompts, or copies
            adapters, are its seconds and 0.
    """

    __slots__ = ("half_s", "line_s", "start_s", "steps")

    def __init__(self, start_s: float, steps: int, line_s: float, half_s: float) -> None:
        """Keep the terms."""
        self.start_s, self.steps = start_s, steps
        self.line_s, self.half_s = line_s, half_s


def common_stretch(stretches: list[Stretch]) -> Stretch:
    """Return the stretch of a group, by those of its ranks with work: the slowest's, cut short."""
    slowest = stretches[0]
    start_s, steps = slowest.start_s, slowest.steps
    for each in stretches:
        start_s, steps = max(start_s, each.start_s), min(steps, each.steps)
        slower_s = each.line_s + each.half_s - slowest.line_s - slowest.half_s
        if slower_s > 0 or (slower_s == 0 and each.line_s > slowest.line_s):
            slowest = each
    return Stretch(start_s, steps, slowest.line_s, slowest.half_s)


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
    def stretch(self) -> Stretch:
        """The stretch that has begun, before `follow` as this rank would do it alone."""
        line_s, half_s = self._line_s, self._half_s
        if self.scheduled_prefills or self.copies_s:
            line_s, half_s = self._seconds, 0.0
        return Stretch(self.start_s, self._steps, line_s, half_s)

    def kv_received(self, request: int, now_s: float) -> None:
        """See `Replica`; the request joins where the whole group begins a step."""
        self.kv_arrived.add(request)
        if self.active:
            self._end_at_next_step(now_s)
        else:
            self.start_stretch(now_s)

    def follow(self, common: Stretch) -> None:
        """Take the steps that the group takes: dummy ones, if there is nothing to compute."""
        if not self.active:
            self.active, self.start_s, self._used_end = True, common.start_s, self.used_blocks
        elif self.start_s < common.start_s:
            self._wait(common.start_s - self.start_s)
        self._line_s, self._half_s = common.line_s, common.half_s
        self._take(common.steps)

    def shorten(self, steps: int) -> None:
        """End the stretch after *steps* steps, as another rank does."""
        if steps != self._steps:
            self._take(steps)


def step_together(ranks: Iterable[Rank]) -> None:
    """Let ranks that have begun a stretch, and those without work, step as the slowest does."""
    stretches = [rank.stretch for rank in ranks if rank.active]
    if stretches:
        common = common_stretch(stretches)
        for rank in ranks:
            rank.follow(common)


def keep_in_step(changed: Rank) -> None:
    """Begin the stretch of an idle group with that of one rank, or end it as early as that."""
    if not changed.active:
        return
    if all(rank.active for rank in changed.ranks):
        steps = changed.stretch.steps
        if not steps and any(rank.scheduled_prefills for rank in changed.ranks):
            steps = 1  # prompts that are scheduled are computed, though late (eq. Q9)
        for rank in changed.ranks:
            rank.shorten(steps)
    else:
        step_together(changed.ranks)
