"""LoRA adapters in the slots of one replica."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from minicluster.engine_model.limits import LoraLimits

NO_ADAPTER = -1
"""Adapter number of a request for the model itself, which needs no slot."""


class LoraSlots:
    """
    The adapters of the running requests of one replica, and those left in slots (eq. Q15).

    A batch holds at most as many adapters as there are slots. One that is in no slot is copied
    from host memory before the step that needs it, to a free slot, or to that whose adapter was
    used longest ago; the step waits for the copy.

    Attributes:
        pending: copies that the step which begins, or is in progress, waits for.

    Ignores: that the slot of an adapter which is needed again in the same step may be given away
    (vLLM takes a step's adapters in no order).
    """

    def __init__(self, adapter: Sequence[int], limits: LoraLimits, loads: list[int]) -> None:
        """
        Start with empty slots.

        Args:
            adapter: adapter number of each request, or `NO_ADAPTER`.
            limits: slots, and seconds of a copy.
            loads: what to count each request's copies in.
        """
        self._adapter, self._limits, self._loads = adapter, limits, loads
        self._running: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._known: set[int] = set()
        self.pending = 0

    def fits(self, request: int) -> bool:
        """Say whether a batch with a request more has no more adapters than slots."""
        running, adapter = self._running, self._adapter[request]
        return len(running) < self._limits.slots or adapter in running or adapter == NO_ADAPTER

    def add(self, request: int) -> None:
        """Take a request that runs from the next step on, whose adapter has to be in a slot."""
        adapter = self._adapter[request]
        if adapter == NO_ADAPTER:
            return
        self._running[adapter] = self._running.get(adapter, 0) + 1
        if self._running[adapter] > 1:
            return
        if adapter in self._idle:
            del self._idle[adapter]
            return
        if len(self._running) + len(self._idle) > self._limits.slots:
            self._idle.popitem(last=False)
        self._loads[request] += 1
        self.pending += 1

    def remove(self, request: int) -> None:
        """Take out a request that runs no more; its adapter stays in its slot for now."""
        adapter = self._adapter[request]
        if adapter == NO_ADAPTER:
            return
        self._running[adapter] -= 1
        if not self._running[adapter]:
            del self._running[adapter]
            self._idle[adapter] = None

    @property
    def pending_s(self) -> float:
        """Seconds by which that step is longer."""
        return self.pending * self._limits.load_s

    def knows_prefix(self, request: int) -> bool:
        """
        Say whether a request of the same adapter has computed its prompt here, and note this one.

        vLLM keys the prefix cache by adapter as well: a prefix that requests share is found from
        the second request of an adapter on.
        """
        adapter = self._adapter[request]
        known = adapter in self._known
        self._known.add(adapter)
        return known
