"""
Runs code that needs Ray Serve and vLLM, each piece in a fork of one process that imported them.

Importing them takes seconds and warns, and some of the code changes them for good: the process
pays for the import once, and what a fork changes the next one does not see.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from typing import Any, NoReturn, Self


class Forks:
    """The process, from the first piece of code on."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.communicate()

    def run(self, code: str, *arguments: str, **environment: str) -> list[str]:
        """Run code as a script with arguments; return the lines that it printed."""
        with tempfile.TemporaryDirectory() as place:
            out, errors = Path(place) / "out", Path(place) / "errors"
            status = self._ask(
                code=code,
                arguments=arguments,
                environment=environment,
                out=str(out),
                errors=str(errors),
                stays=False,
            )
            assert status == 0, errors.read_text()
            return out.read_text().splitlines()

    def start(self, code: str, *arguments: str, log: Path) -> None:
        """Run code as a script until all ends; what it prints goes to *log*."""
        self._ask(
            code=code,
            arguments=arguments,
            environment={},
            out=str(log),
            errors=str(log),
            stays=True,
        )

    def _ask(self, **asked: object) -> int:
        """Have code run; return its exit status, 0 of what stays."""
        if self._server is None:
            self._server = subprocess.Popen(
                [sys.executable, __file__],
                env=os.environ | {"HF_HUB_OFFLINE": "1"},  # read when it is imported
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(asked) + "\n")
        self._server.stdin.flush()
        status = self._server.stdout.readline()
        assert status, "Ray Serve or vLLM cannot be imported; standard error says why"
        return int(status)


def _serve() -> None:
    """Import what takes long, then fork for each line of standard input until it ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    import serving.replicas.vllm  # noqa: F401, PLC0415

    staying = []
    for line in sys.stdin:
        asked = json.loads(line)
        child = os.fork()
        if not child:
            _become(asked)
        if asked["stays"]:
            staying.append(child)
        status = 0 if asked["stays"] else os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(status, file=answers, flush=True)
    for child in staying:
        os.kill(child, signal.SIGTERM)
        os.waitpid(child, 0)
    os._exit(0)  # what was imported would take seconds to leave


def _become(asked: dict[str, Any]) -> NoReturn:
    """Run a piece of code in this fork, and end it."""
    status = 1
    try:
        for path, descriptor in ((asked["out"], 1), (asked["errors"], 2)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
        os.environ.update(asked["environment"])
        sys.argv[1:] = asked["arguments"]
        exec(asked["code"], {"__name__": "__main__"})  # noqa: S102  (a test's own)
        status = 0
    except BaseException:  # noqa: BLE001  (told by the status)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # Ray's and vLLM's own
    _serve()
