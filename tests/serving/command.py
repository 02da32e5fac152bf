"""The command `serving` in a directory, and a port that is taken."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from unittest.mock import patch

import pytest

from serving.cli import main

SERVING = (sys.executable, "-m", "serving.cli")
LIMIT_S = 600


def serving(
    place: Path, *arguments: object, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command of `serving` in *place*, whatever comes of it."""
    return subprocess.run(
        [*SERVING, *map(str, arguments)],
        cwd=place,
        env=os.environ if env is None else env,
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )


def serving_here(
    place: Path, *arguments: object, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run in this process a command that starts nothing, as `serving` does in one of its own."""
    words, said, errors = ["serving", *map(str, arguments)], StringIO(), StringIO()
    environment = dict(os.environ if env is None else env)
    with (
        chdir(place),
        patch.dict(os.environ, environment, clear=True),
        patch.object(sys, "argv", words),
        redirect_stdout(said),
        redirect_stderr(errors),
        pytest.raises(SystemExit) as ended,
    ):
        main()
    assert isinstance(ended.value.code, int)
    return subprocess.CompletedProcess(words, ended.value.code, said.getvalue(), errors.getvalue())


@contextmanager
def taken_port(host: str = "127.0.0.1") -> Iterator[str]:
    """Have a port taken, so that `serving up` starts nothing."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as other:
        yield str(other.getsockname()[1])
