"""An engine whose replica was killed ends too: a part of our plugin for vLLM's processes."""

from __future__ import annotations

import os
import signal
import threading
import time

REPLICA = "MINICLUSTER_REPLICA"
"""Environment variable: the process id of the replica that starts an engine."""

LOOK_S = 0.5


def end_with_replica() -> None:
    """
    Have this process killed when the replica that started it is gone.

    vLLM's workers end with their engine; but nobody tells an engine of a replica that was killed.
    It would keep its memory, and the ports that the next replica waits for.
    """
    replica = os.environ.get(REPLICA)
    if replica is None or os.getppid() != int(replica):
        return  # the replica itself, or a worker
    threading.Thread(target=_watch, args=(int(replica),), daemon=True).start()


def _watch(replica: int) -> None:
    """Look who our parent is; orphans get another one."""
    while os.getppid() == replica:
        time.sleep(LOOK_S)
    os.kill(os.getpid(), signal.SIGKILL)
