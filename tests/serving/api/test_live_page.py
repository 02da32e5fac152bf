"""The live page in a real browser, over pools that need no engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import uvicorn

from serving.cluster.ports import free_ports
from serving.protocol.messages import EndpointConfig, SimulatedEngines
from tests.browser import Page, opened
from tests.serving.endpoint_app import endpoint_app
from tests.serving.fake_servers import FakeServers
from tests.serving.http_client import KEY

pytestmark = pytest.mark.browser

CHAT_LIMIT = {"MINICLUSTER_MAX_OUTPUT_TOKENS": "20"}
READY = "document.getElementById('state').textContent === 'ready'"
IDLE = "!document.getElementById('send').disabled"


@contextmanager
def _page(
    config: EndpointConfig,
    place: Path,
    servers: FakeServers,
    environment: dict[str, str] | None = None,
) -> Iterator[Page]:
    """Have the page of an endpoint, up in a thread, open in a browser."""
    [port] = free_ports(1)
    app = endpoint_app(config, servers, environment or {})
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.05)
    try:
        with opened(f"http://127.0.0.1:{port}/", place) as page:
            yield page
    finally:
        server.should_exit = True
        thread.join()


def test_a_person_sees_the_plan_and_chats(config: EndpointConfig, tmp_path: Path) -> None:
    """The table shows plan, SLO and measurement; a chat streams; nothing else is loaded."""
    servers = FakeServers(ttft_s=0.05, itl_s=0.002)
    with _page(config, tmp_path, servers) as page:
        page.wait_for(READY)
        page.type_into("say", "How are you?")
        page.wait_for("document.querySelector('#talk .assistant')?.textContent.includes('t199')")
        page.wait_for(IDLE)
        assert "first token after" in page.evaluate("document.getElementById('timing').textContent")
        cells = page.wait_for(
            "(c => c[4]?.endsWith('ms') && c)("
            "[...document.querySelectorAll('#latency tr:first-child td')]"
            ".map(td => td.textContent))"
        )
        assert (cells[0], cells[1], cells[3]) == ("TTFT", "100.0 ms", "500.0 ms")
        pool = page.evaluate("document.querySelector('#pools tr').innerText").split("\t")
        assert pool == ["prefill", "TP1 cpu", "d0", "1", "1"]
        page.type_into("say", "<img src=x onerror=document.title='gone'>")
        page.wait_for("document.querySelectorAll('#talk .assistant').length === 2")
        page.wait_for(IDLE)
        assert page.evaluate("document.title") == "minicluster"
        assert page.evaluate("document.querySelectorAll('#talk img').length") == 0
        assert page.console == []
        own = page.evaluate("location.origin")
        assert all(each.startswith(own) for each in page.requested), page.requested
        for width in (1200, 360):
            page.resize(width)
            wide = page.evaluate("document.documentElement.scrollWidth > innerWidth")
            assert not wide, f"scrolls sideways at {width}"
    assert [len(body["messages"]) for body in servers.seen if "messages" in body] == [1, 3]


def test_the_page_keeps_the_operators_limit(config: EndpointConfig, tmp_path: Path) -> None:
    """Where answers may be short only, the page asks for short ones, and chats."""
    servers = FakeServers()
    with _page(config, tmp_path, servers, CHAT_LIMIT) as page:
        page.wait_for(READY)
        page.type_into("say", "Hello")
        page.wait_for("document.querySelector('#talk .assistant')?.textContent.includes('t19')")
        page.wait_for(IDLE)
        assert page.evaluate("document.querySelectorAll('#talk .bad').length") == 0
    assert [body["max_tokens"] for body in servers.seen if "messages" in body] == [20]


def test_a_locked_endpoint_asks_for_a_key(config: EndpointConfig, tmp_path: Path) -> None:
    """Without a key the page shows a lock and no plan; with it everything."""
    with _page(config, tmp_path, FakeServers(), {"MINICLUSTER_API_KEYS": KEY}) as page:
        page.wait_for("getComputedStyle(document.getElementById('lock')).display === 'flex'")
        assert page.evaluate("document.getElementById('model').textContent") == ""
        page.type_into("key", KEY)
        page.wait_for(READY)
        assert "demo" in page.evaluate("document.getElementById('model').textContent")


def test_errors_are_shown(config: EndpointConfig, tmp_path: Path) -> None:
    with _page(config, tmp_path, FakeServers(fails_after=3)) as page:
        page.wait_for(READY)
        page.type_into("say", "Hello")
        page.wait_for("document.querySelector('#talk .bad')?.textContent.includes('failed')")
        assert page.evaluate(IDLE)


def test_simulated_engines_are_not_taken_for_real_ones(
    config: EndpointConfig, tmp_path: Path
) -> None:
    """Nothing on the page calls their latencies measured, and their seconds are explained."""
    simulated = SimulatedEngines(slowdown=12.0, text_tokens="bytes/4")
    with _page(replace(config, simulated=simulated), tmp_path, FakeServers()) as page:
        page.wait_for(READY)
        says = page.evaluate("document.body.innerText")
    assert "simulated engines, 12 times slower" in says
    assert "each second of the plan takes 12 s" in says
    assert "simulated p99" in says
    assert "measured" not in says
