"""The live page in a real browser, over pools that need no engine."""

from __future__ import annotations

import json
import re
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


def text(page: Page, element: str) -> str:
    """Return what an element says."""
    said: str = page.evaluate(f"document.getElementById({element!r}).textContent")
    return said


def completion(prompt_tokens: int, max_tokens: int) -> str:
    """Return a script that sends a completion, which is its status."""
    prompt = {"prompt": [5] * prompt_tokens, "max_tokens": max_tokens, "stream": True}
    options = {
        "method": "POST",
        "headers": {"Content-Type": "application/json"},
        "body": json.dumps({"model": "demo", **prompt}),
    }
    return f"fetch('v1/completions', {json.dumps(options)}).then(answer => answer.status)"


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
    """The charts show prediction, SLO and measurement; a chat streams; nothing else is loaded."""
    servers = FakeServers(ttft_s=0.05, itl_s=0.002)
    with _page(config, tmp_path, servers) as page:
        page.wait_for(READY)
        page.type_into("say", "How are you?")
        page.wait_for("document.querySelector('#talk .assistant')?.textContent.includes('t199')")
        page.wait_for(IDLE)
        assert "first token after" in text(page, "timing")
        page.wait_for("document.getElementById('tpot').textContent.endsWith('ms')")
        for label in ("predicted 100 ms", "SLO 500 ms", "p99"):
            assert label in text(page, "ttft_chart")
        layout = text(page, "layout").replace("\N{MULTIPLICATION SIGN}", "x")
        assert layout == "1 x TP1 prefill + 1 x TP1 decode = 2 x cpu"
        assert "1 of 1 replicas" in text(page, "first")
        page.type_into("say", "<img src=x onerror=document.title='gone'>")
        page.wait_for("document.querySelectorAll('#talk .assistant').length === 2")
        page.wait_for(IDLE)
        assert page.evaluate("document.title") == "minicluster"
        assert page.evaluate("document.querySelectorAll('#talk img').length") == 0
        assert page.console == []
        own = page.evaluate("location.origin")
        assert all(each.startswith(own) for each in page.requested), page.requested
        for width in (1280, 390):
            page.resize(width, 720)
            wide = page.evaluate("document.documentElement.scrollWidth > innerWidth")
            assert not wide, f"scrolls sideways at {width}"
            scrolls = page.evaluate("document.documentElement.scrollHeight > innerHeight")
            assert scrolls == (width == 390)
    assert [len(body["messages"]) for body in servers.seen if "messages" in body] == [1, 3]


def test_the_numbers_are_those_of_metrics(config: EndpointConfig, tmp_path: Path) -> None:
    """And who is turned away cannot be overlooked: here each prompt that takes over 50 ms."""
    assert config.slo is not None
    tight = replace(config, slo=replace(config.slo, ttft_s=0.05))
    servers = FakeServers(ttft_s=0.02, itl_s=0.2)
    with _page(tight, tmp_path, servers) as page:
        page.wait_for(READY)
        statuses = [page.evaluate(completion(tokens, max_tokens=2)) for tokens in (3, 3, 1000)]
        page.evaluate(completion(3, max_tokens=500))
        page.wait_for("document.getElementById('decode').textContent === '1'")
        page.wait_for("document.getElementById('ok').textContent === '2'")
        lines = page.evaluate("fetch('metrics').then(answer => answer.text())").splitlines()
        series = dict(line.rsplit(" ", 1) for line in lines if line[0] != "#")
        assert statuses == [200, 200, 429]
        for element, labels in {
            "shed": 'requests_total{outcome="shed",path="none"}',
            "ok": 'requests_total{outcome="ok",path="remote"}',
            "decode": 'stage_requests{stage="decode"}',
            "handoff": 'stage_requests{stage="handoff"}',
        }.items():
            assert float(text(page, element)) == float(series[f"minicluster_{labels}"]), element
        for name in ("ttft", "tpot"):
            seconds = float(
                series[f'minicluster_recent_seconds{{percentile="p99",quantity="{name}"}}']
            )
            assert text(page, name) == f"{seconds * 1e3:.{0 if seconds >= 0.1 else 1}f} ms"
        said = page.evaluate("document.getElementById('shed_card').innerText")
        assert re.search(r"1\s+rejected \(429\)\s+33 % of 3", said)
        assert "no idle cluster would keep the SLO" in said
        page.wait_for("document.getElementById('shed_card').classList.contains('alarm')")
        page.wait_for("document.getElementById('state').textContent === 'rejecting requests'")


def test_an_endpoint_that_is_gone_is_missed(config: EndpointConfig, tmp_path: Path) -> None:
    with _page(config, tmp_path, FakeServers()) as page:
        page.wait_for(READY)
        assert page.evaluate("getComputedStyle(document.getElementById('gone')).display") == "none"
        page.call(
            "Network.emulateNetworkConditions",
            offline=True,
            latency=0,
            downloadThroughput=-1,
            uploadThroughput=-1,
        )
        page.wait_for("getComputedStyle(document.getElementById('gone')).display !== 'none'")
        assert re.match(r"No answer for \d+ s: ", text(page, "gone"))


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
        assert text(page, "model") == ""
        page.type_into("key", KEY)
        page.wait_for(READY)
        assert text(page, "model") == "demo"


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
    assert "p99 simulated" in says
    assert "measured" not in says
