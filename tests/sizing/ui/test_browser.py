"""The page of `sizing ui` as the command serves it, in a real browser."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from serving.cluster.ports import free_ports
from tests.browser import Page, opened
from tests.sizing.stacks.test_read import SERVE
from tests.sizing.stacks.test_traffic import log_lines

pytestmark = pytest.mark.browser

TEXT = "document.body.innerText"
QUICK = "scenario=llama-3.1-8b-h100&workload.requests_per_s=2&search.pools=mixed"
DONE = f"{TEXT}.includes('This is the answer to the fields')"
MOST_PIXELS = 3_000
"""Height of a page of which no question was asked yet, at any width."""


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for plans on a busy machine."""
    monkeypatch.setattr("tests.browser.LIMIT_S", 200.0)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve the page, until the tests of this file are done."""
    log = tmp_path_factory.mktemp("ui") / "log.txt"
    [port] = free_ports(1)
    command = [str(Path(sys.executable).parent / "sizing"), "ui", "--port", str(port)]
    with log.open("w") as file:
        server = subprocess.Popen(command, stdout=file, stderr=file)
    url = f"http://127.0.0.1:{port}/"
    try:
        for _ in range(600):
            assert server.poll() is None, log.read_text()
            try:
                urlopen(f"{url}_stcore/health").close()  # noqa: S310  (ours)
                break
            except URLError:
                time.sleep(0.1)
        yield url
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(timeout=30)
    assert server.returncode == 0
    assert "Traceback" not in log.read_text()


def look(page: Page, most_pixels: int = MOST_PIXELS) -> None:
    """Nothing is loaded from elsewhere, nothing complains, no width is too wide or too tall."""
    own = page.evaluate("location.host")
    elsewhere = [
        each
        for each in page.requested
        if not each.startswith((f"http://{own}", f"ws://{own}", "data:", "blob:"))
    ]
    assert elsewhere == []
    assert page.console == []
    for width in (1280, 390):
        page.resize(width)
        time.sleep(0.5)
        main = "document.querySelector('[data-testid=stMain]')"
        assert page.evaluate(f"{main}.scrollWidth <= innerWidth"), f"scrolls at {width}"
        assert page.evaluate(f"{main}.scrollHeight") <= most_pixels, f"too tall at {width}"
        plan = "document.querySelector('.st-key-plan button').getBoundingClientRect()"
        assert page.evaluate(f"{plan}.bottom <= innerHeight && {plan}.top > 0"), "Plan out of view"
    unnamed = page.evaluate(
        "[...document.querySelectorAll('input, select, textarea')].filter(e =>"
        " e.type !== 'file' && !e.labels?.length && !e.getAttribute('aria-label')).length"
    )
    assert unnamed == 0, "fields without a label"


def press(page: Page, key: str, code: int) -> None:
    """Press one key, as a person without a mouse does."""
    for kind in ("rawKeyDown", "char", "keyUp") if key == "Enter" else ("rawKeyDown", "keyUp"):
        text = {"text": "\r"} if kind == "char" else {}
        page.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **text)


def field(label: str) -> str:
    """Return the field of that label."""
    return (
        "[...document.querySelectorAll('input')].find(e =>"
        f" e.labels?.[0]?.innerText.startsWith({label!r}) || e.ariaLabel === {label!r})"
    )


def open_tab(page: Page, name: str) -> None:
    tab = f"[...document.querySelectorAll('[role=tab]')].find(e => e.innerText === {name!r})"
    page.evaluate(f"{tab}.click()")


def type_into(page: Page, label: str, text: str) -> None:
    page.wait_for(f"{field(label)} !== undefined")
    page.evaluate(f"{field(label)}.focus()")
    page.evaluate(f"{field(label)}.select()")
    page.call("Input.insertText", text=text)


def test_the_answer_at_once_and_another_by_keyboard(address: str, tmp_path: Path) -> None:
    """No click is needed; a changed field says so, Enter plans; terms open, questions are asked."""
    with opened(address, tmp_path) as page:
        page.wait_for(DONE)
        assert "llama-3.1-8b at 20 requests/s: 3 h100-sxm GPUs" in page.evaluate(TEXT)
        look(page)
        page.resize(1280)
        type_into(page, "Requests/s", "2")
        page.evaluate("document.activeElement.blur()")
        page.wait_for(f"{TEXT}.includes('Changed: Requests/s 20') || {TEXT}.includes('at 2 req')")
        page.evaluate(f"{field('Requests/s')}.focus()")
        press(page, "Enter", 13)
        page.wait_for(f"{TEXT}.includes('llama-3.1-8b at 2 requests/s')")
        page.wait_for(DONE)
        assert "workload.requests_per_s=2" in page.evaluate("location.search")
        open_tab(page, "Charts")
        page.wait_for("document.querySelectorAll('.js-plotly-plot .js-line').length >= 2")
        page.evaluate(
            "[...document.querySelectorAll('button')]"
            ".find(e => e.innerText.startsWith('TTFT p99: how?')).focus()"
        )
        press(page, "Enter", 13)
        page.wait_for(f"{TEXT}.includes('Mean TTFT')")
        press(page, "Escape", 27)
        for tab, question in (
            ("Other sizes", "What do other numbers"),
            ("A day", "How many GPU-hours"),
        ):
            open_tab(page, tab)
            page.evaluate(
                "[...document.querySelectorAll('button')]"
                f".find(e => e.innerText.startsWith({question!r})).click()"
            )
            time.sleep(0.3)
        page.wait_for(f"{TEXT}.includes('SLO held')")
        open_tab(page, "Other sizes")
        page.wait_for(f"{TEXT}.includes('requests/s within the SLO')")
        look(page, most_pixels=2 * MOST_PIXELS)


def test_a_link_compares_gpus_and_engines(address: str, tmp_path: Path) -> None:
    ticked = "compare.gpu=h200-sxm,rtx-4090&compare.engine=sglang%200.5"
    with opened(f"{address}?{QUICK}&{ticked}", tmp_path) as page:
        page.wait_for(DONE)
        page.wait_for(f"{TEXT}.includes('same GPUs, +$0.90/hour (+20%)')")
        assert "llama-3.1-8b at 2 requests/s: 1 h100-sxm GPU" in page.evaluate(TEXT)
        look(page, most_pixels=4_000)


def test_no_plan_says_why_and_plans_with_more_gpus(address: str, tmp_path: Path) -> None:
    few = "scenario=llama-3.1-8b-h100&cluster.max_gpus=1"
    with opened(f"{address}?{few}", tmp_path) as page:
        page.wait_for(f"{TEXT}.includes('Nearest miss')")
        look(page)
        page.resize(1280)
        page.evaluate(
            "[...document.querySelectorAll('button')]"
            ".find(e => e.innerText === 'Plan with 3 GPUs').click()"
        )
        page.wait_for(f"{TEXT}.includes('20 requests/s: 3 h100-sxm GPUs')")


def drop(page: Page, label: str, file: Path) -> None:
    """Choose a file in the uploader of that label."""
    uploader = (
        "[...document.querySelectorAll('[data-testid=stFileUploader]')]"
        f".find(e => e.textContent.startsWith({label!r}))"
    )
    page.wait_for(f"{uploader} !== undefined")
    chosen = page.call(
        "Runtime.evaluate", expression=f"{uploader}.querySelector('input[type=file]')"
    )
    page.call("DOM.setFileInputFiles", files=[str(file)], objectId=chosen["result"]["objectId"])
    page.wait_for(f"{uploader}.textContent.includes({file.name!r})")
    time.sleep(1)


def click_plan(page: Page) -> None:
    """Leave the field first, as a real click does: what was typed is taken only then."""
    page.evaluate("document.activeElement.blur()")
    time.sleep(1)
    page.evaluate(
        "[...document.querySelectorAll('button')].find(e => e.innerText === 'Plan').click()"
    )


def test_what_runs_today_and_a_log_are_read_and_bettered(address: str, tmp_path: Path) -> None:
    """A command is pasted by keyboard, a log dropped in; the link shows the same."""
    log = tmp_path / "access.log"
    log.write_text("\n".join(log_lines()))
    with opened(f"{address}?{QUICK}", tmp_path / "profile") as page:
        page.wait_for(DONE)
        page.evaluate(
            "[...document.querySelectorAll('summary')]"
            ".find(e => e.textContent.includes('What I run today')).focus()"
        )
        press(page, "Enter", 13)
        page.wait_for("document.querySelector('textarea')?.getBoundingClientRect().width > 100")
        page.evaluate("document.querySelector('textarea').focus()")
        page.call("Input.insertText", text=f"# 4 replicas\n{SERVE} -tp 2 --port 9")
        page.evaluate("document.activeElement.blur()")
        drop(page, "Access log", log)
        click_plan(page)
        page.wait_for(f"{TEXT}.includes('Today and better')")
        page.wait_for(DONE)
        link = page.evaluate("location.href")
        for again in (False, True):
            if again:
                page.call("Page.navigate", url="about:blank")
                page.call("Page.navigate", url=link)
                page.wait_for(DONE)
            for words in ("4xTP2 mixed", "--port", "left out: 30 lines without token counts"):
                page.wait_for(f"{TEXT}.includes({words!r})")
            page.wait_for(f"{field('Mixed pool')}?.value === '4xTP2'")
            page.wait_for(f"{field('Lengths from a log')}?.value.startsWith('[')")
            look(page, most_pixels=2 * MOST_PIXELS)
            page.resize(1280)


def test_a_bad_file_is_said_when_it_is_dropped(address: str, tmp_path: Path) -> None:
    """Beside its field and in the bar with Plan; what was typed stays."""
    bad = tmp_path / "bad.txt"
    bad.write_text(f"{SERVE} -tp two")
    with opened(f"{address}?{QUICK}", tmp_path / "profile") as page:
        page.wait_for(DONE)
        type_into(page, "Requests/s", "3")
        page.evaluate("document.activeElement.blur()")
        drop(page, "Script of", bad)
        page.wait_for(f"{TEXT}.split(\"bad.txt:1: --tensor-parallel-size is 'two'\").length === 3")
        assert page.evaluate(f"{field('Requests/s')}.value") == "3"
        look(page, most_pixels=4_000)
