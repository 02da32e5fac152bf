"""A headless Chromium, by its DevTools protocol."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from websockets.sync.client import ClientConnection, connect

from tests.waiting import until

LIMIT_S = 30.0


class Page:
    """A tab; what its console says and what it asks the network for is kept."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self.console: list[str] = []
        self.requested: list[str] = []
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:  # noqa: ANN401
        number = next(self._ids)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message: dict[str, Any] = json.loads(self._socket.recv(timeout=LIMIT_S))
            self._note(message)
            if message.get("id") == number:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        if message.get("method") in {"Runtime.exceptionThrown", "Log.entryAdded"}:
            self.console.append(json.dumps(params)[:500])
        if message.get("method") == "Network.requestWillBeSent":
            self.requested.append(params["request"]["url"])

    def evaluate(self, expression: str) -> Any:  # noqa: ANN401
        done = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        return done["result"].get("value")

    def wait_for(self, expression: str) -> Any:  # noqa: ANN401
        until(lambda: bool(self.evaluate(expression)), expression, LIMIT_S)
        return self.evaluate(expression)

    def type_into(self, element: str, text: str) -> None:
        """Type as a person does, and press Enter."""
        self.evaluate(f"document.getElementById({element!r}).focus()")
        self.call("Input.insertText", text=text)
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key="Enter",
                text="\r",
                windowsVirtualKeyCode=13,
            )

    def resize(self, width: int, height: int = 900) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )


@contextmanager
def opened(url: str, place: Path) -> Iterator[Page]:
    """Have *url* open in a browser that keeps its files in *place*."""
    found = shutil.which("chromium") or shutil.which("google-chrome")
    assert found, "no Chromium: `apt-get install chromium`"
    options = ("--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0")
    command = [found, *options, f"--user-data-dir={place}", "about:blank"]
    browser = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        told = place / "DevToolsActivePort"
        until(lambda: bool(told.read_text()), "Chromium starts", LIMIT_S)
        port = told.read_text().split()[0]
        with urlopen(f"http://127.0.0.1:{port}/json/list") as answer:
            [tab] = [each for each in json.load(answer) if each["type"] == "page"]
        # No pings: while nobody reads, events of a busy page hold up what answers them.
        with connect(tab["webSocketDebuggerUrl"], max_size=None, ping_interval=None) as socket:
            page = Page(socket)
            page.call("Page.navigate", url=url)
            yield page
    finally:
        browser.terminate()
        browser.wait()
