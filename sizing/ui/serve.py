"""The server of the page: Streamlit, on this machine only, and quiet."""

from __future__ import annotations

import os
import socket
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from minicluster.errors import InputError

QUIET = {
    "browser.gatherUsageStats": "false",
    "server.headless": "true",  # no question for an e-mail address, no browser of its own
    "server.fileWatcherType": "none",
    "server.maxUploadSize": "64",  # megabytes, of a log
    "client.toolbarMode": "minimal",
    "client.showErrorDetails": "none",
    "global.developmentMode": "false",
}
"""Options of Streamlit: nothing is sent or asked of the internet."""

START = (
    "import sizing.ui.dropped; from sizing.ui.answer import warm;"
    " from threading import Thread; Thread(target=warm, daemon=True).start();"
    " from streamlit.web.cli import main; main(prog_name='streamlit')"
)
"""Streamlit's command; the first answer is on its way before a browser asks for it."""


def serve(host: str, port: int) -> NoReturn:
    """
    Become Streamlit, which serves the page until Ctrl-C or SIGTERM.

    Raises:
        InputError: the address cannot be listened on.
        ModuleNotFoundError: Streamlit, which the extra `ui` brings, is not installed.
    """
    if find_spec("streamlit") is None:
        raise ModuleNotFoundError(name="streamlit")
    _refuse_taken(host, port)
    options = {"server.address": host, "server.port": str(port), **QUIET}
    page = Path(__file__).with_name("page.py")
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    command = [sys.executable, "-c", START, "run", str(page), *words]
    os.execv(command[0], command)  # noqa: S606  (no shell is wanted)


def _refuse_taken(host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind((host, port))
        except (OSError, OverflowError) as error:
            found = f"{host}:{port}"
            raise InputError("--host, --port", found, f"an address to listen on: {error}") from None
