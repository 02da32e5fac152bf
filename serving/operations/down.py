"""Removal of a deployment: all processes and the state."""

from __future__ import annotations

import signal
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from minicluster.errors import TargetFailed
from serving.cluster.processes import stop
from serving.cluster.state import remove_state

if TYPE_CHECKING:
    from collections.abc import Iterator

    from serving.cluster.state import State

DRAIN_LIMIT_S = 300.0
"""Longest drain on a foreign cluster; on our own, replicas are stopped without one."""


def take_down(state: State) -> None:
    """
    Stop what `serving up` started; on a foreign cluster, remove only our application.

    Raises:
        TargetFailed: a process does not end, even after SIGKILL.
    """
    with _uninterrupted():
        if state.cluster_id:
            left = stop(state.cluster_id)
            if left:
                raise TargetFailed(f"processes {sorted(left)} do not end; the state is kept")
        else:
            _remove_application(state.address)
        remove_state(state)


def _remove_application(address: str) -> None:
    """Delete our application from a shared cluster, and stop Serve if no other one runs."""
    from ray import serve  # noqa: PLC0415  (seconds to import)

    from serving.cluster.connection import connected  # noqa: PLC0415
    from serving.protocol.app_spec import APP  # noqa: PLC0415

    with connected(address):
        if APP in serve.status().applications:
            serve.delete(APP, _blocking=False)
        deadline = time.monotonic() + DRAIN_LIMIT_S
        while APP in (left := serve.status().applications):
            if time.monotonic() > deadline:
                raise TargetFailed(f"{APP} is still {left[APP].status}; the state is kept")
            time.sleep(0.5)
        if not left:
            serve.shutdown()


@contextmanager
def _uninterrupted() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
