from __future__ import annotations

import signal
import subprocess
import sys
import time
from contextlib import suppress

ENGINE = (
    "from serving.replicas.vllm_plugin import end_with_replica;"
    " end_with_replica(); print(1, flush=True); "
)
REPLICA = f"""
import os, subprocess, sys
os.environ["MINICLUSTER_REPLICA"] = str(os.getpid())
engine = subprocess.Popen([sys.executable, "-c", {ENGINE!r} + "import time; time.sleep(600)"])
print(engine.pid, flush=True)
engine.wait()
"""


def test_an_engine_ends_with_its_replica() -> None:
    """When the process that started it is killed, an engine does not live on as an orphan."""
    command = [sys.executable, "-c", REPLICA]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as replica:
        assert replica.stdout is not None
        said = {int(replica.stdout.readline()) for _ in range(2)}
        [engine] = said - {1}
        assert _lives(engine)
        replica.send_signal(signal.SIGKILL)
        replica.wait()
        deadline = time.monotonic() + 30
        while _lives(engine):
            assert time.monotonic() < deadline, "an orphan lives on"
            time.sleep(0.1)


def _lives(pid: int) -> bool:
    """Tell whether a process is there; one that is dead and not yet buried is not."""
    with suppress(OSError, IndexError), open(f"/proc/{pid}/stat", encoding="utf-8") as stat:  # noqa: PTH123
        return stat.read().rpartition(")")[2].split()[0] not in "ZX"
    return False
