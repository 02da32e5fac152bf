"""The simulated ranks of a data-parallel group, each an engine of its own, in step (eq. Q11)."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Protocol

from minicluster.engine_model.lockstep import Stretch, common_stretch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    Propose = Callable[[Stretch | None], None]
    """Proposes the step that a rank would do alone; `None`: it has no work."""


class Member(Protocol):
    """A rank, as its group calls it."""

    def ask(self) -> None:
        """Propose a step: another rank has begun one while the group was idle."""

    def begin(self, common: Stretch | None) -> None:
        """Begin the step that all have agreed on; `None`: no rank has work."""

    def freeze(self, seconds: float) -> None:
        """Let engine time stand still for *seconds* of the clock."""

    def died(self) -> None:
        """Fail: another rank died, and no step ends without it."""


class Group(Protocol):
    """A group, as its ranks call it."""

    def join(self, member: Member) -> Propose:
        """Take a rank; return how it proposes steps."""

    def freeze(self, seconds: float) -> None:
        """Freeze all ranks."""

    def fail(self) -> None:
        """Fail all ranks."""


class Lockstep:
    """
    Agrees on the steps of a group by `minicluster.engine_model.lockstep`, as `sizing` does.

    A step is agreed on once every rank has proposed one. At its end each proposes the next one; an
    idle group asks its ranks when one of them has got work.
    """

    def __init__(self, size: int) -> None:
        """Start idle, without ranks; *size* will join."""
        self._size = size
        self._members: list[Member] = []
        self._proposed: dict[int, Stretch | None] = {}
        self._idle = True
        self._failed = False
        self._untold: deque[Callable[[], None]] = deque()
        self._telling = False

    def join(self, member: Member) -> Propose:
        """See `Group`."""
        rank = len(self._members)
        self._members.append(member)
        return partial(self._propose, rank)

    def freeze(self, seconds: float) -> None:
        """See `Group`."""
        self._tell(partial(member.freeze, seconds) for member in self._members)

    def fail(self) -> None:
        """See `Group`."""
        if not self._failed:
            self._failed = True
            self._tell(member.died for member in self._members)

    def _propose(self, rank: int, stretch: Stretch | None) -> None:
        self._proposed[rank] = stretch
        if self._idle:
            self._idle = False
            self._tell(each.ask for at, each in enumerate(self._members) if at != rank)
        elif len(self._proposed) == self._size:
            found = [stretch for stretch in self._proposed.values() if stretch is not None]
            self._proposed.clear()
            self._idle = not found
            common = common_stretch(found) if found else None
            self._tell(partial(member.begin, common) for member in self._members)

    def _tell(self, messages: Iterable[Callable[[], None]]) -> None:
        """Call ranks, each in the order in which they are told, also if one calls back."""
        self._untold.extend(messages)
        if self._telling:
            return
        self._telling = True
        while self._untold:
            self._untold.popleft()()
        self._telling = False
