"""
`make pictures`: make the pictures of README and docs anew, from the pages that the code makes now.

A headless Chromium takes a picture when its page has answered. `docs/images/pictures.json` keeps a
hash of the files that lay out each page; a test compares it, so that no picture outlives its page.
Numbers on a picture may be older: they change with every fit.
Needs Chromium. Takes two minutes; the load is 200 requests to simulated engines on loopback.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.error import URLError
from urllib.request import urlopen

from serving.cluster.ports import free_ports

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.browser import Page, opened  # noqa: E402  (the path first)

IMAGES = ROOT / "docs" / "images"
HASHES = IMAGES / "pictures.json"
BIN = Path(sys.executable).parent
SCENARIO = "llama-3.1-70b-h100"
LOAD = ("--requests", "200", "--warmup", "5")
SLOWDOWN = "3"
LOAD_LIMIT_S = 300.0
LIVE_S = 45.0
"""Seconds of load before the live page is taken: its charts have a few minutes of the plan."""

CHAT_S = 12.0
"""Seconds after which the answer of its chat fills the space there is."""

TEXT = "document.body.innerText"
PLAN_ANSWERED = f"{TEXT}.includes('TTFT') && /\\d GPUs/.test({TEXT})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """
    One picture.

    Attributes:
        width, height: pixels of the window; what is below it is not in the picture.
        answered: JavaScript that is true once the page shows its answer.
        drawn_by: patterns of the files that draw the page, below the root.
    """

    name: str
    width: int
    height: int
    answered: str
    drawn_by: tuple[str, ...]

    @property
    def drawers(self) -> str:
        """Hash of the files that draw the page."""
        digest = hashlib.sha256()
        for pattern in self.drawn_by:
            for path in sorted(ROOT.glob(pattern)):
                digest.update(path.read_bytes())
        return digest.hexdigest()[:16]


PAGES = ("minicluster/pages/*.*",)
PICTURES = {
    picture.name: picture
    for picture in (
        Picture(
            name="plan-page.png", width=1000, height=1000, answered=PLAN_ANSWERED,
            drawn_by=(*PAGES, "sizing/report/plan_*.py"),
        ),
        Picture(
            name="ui.png", width=1280, height=900, answered=PLAN_ANSWERED,
            drawn_by=("sizing/ui/*.py", "minicluster/pages/page.css"),
        ),
        Picture(
            name="study-page.png", width=1000, height=900, answered=f"{TEXT}.length > 500",
            drawn_by=(*PAGES, "sizing/report/fabric.py"),
        ),
        Picture(
            name="live-page.png", width=1280, height=720, answered=f"/\\d ms/.test({TEXT})",
            drawn_by=("serving/api/page.html",),
        ),
        Picture(
            name="loadtest-page.png", width=1000, height=1000,
            answered=f"/MET|MISSED|INCONCLUSIVE/.test({TEXT})",
            drawn_by=(*PAGES, "loadtest/report/run_page.py"),
        ),
    )
}  # fmt: skip


def main() -> int:
    """Make the pictures that are named, or those whose pages have changed, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="pictures; default: those that are stale")
    parser.add_argument("--all", action="store_true")
    asked = parser.parse_args()
    chosen = asked.names or [name for name in PICTURES if asked.all or name in stale()]
    if unknown := set(chosen) - set(PICTURES):
        parser.error(f"no picture {', '.join(unknown)}; expected of {', '.join(PICTURES)}")
    with tempfile.TemporaryDirectory() as folder:
        for page in pages(Path(folder), set(chosen)):
            print(f"docs/images/{page}", flush=True)
    return 0


def stale() -> list[str]:
    """Return the pictures whose pages were changed since they were taken."""
    known = json.loads(HASHES.read_text(encoding="utf-8")) if HASHES.exists() else {}
    return [name for name, picture in PICTURES.items() if known.get(name) != picture.drawers]


def pages(folder: Path, chosen: set[str]) -> Iterator[str]:
    """Make each page, take its picture, and yield its name."""
    plan = folder / "plan.json"
    if {"plan-page.png", "live-page.png", "loadtest-page.png"} & chosen:
        run(folder, "sizing", "plan", SCENARIO, "-o", plan, "--html", folder / "plan.html")
    if "plan-page.png" in chosen:
        yield take("plan-page.png", (folder / "plan.html").as_uri(), folder)
    if "study-page.png" in chosen:
        run(folder, "sizing", "fabric", "rail-only", "--html", folder / "study.html")
        yield take("study-page.png", (folder / "study.html").as_uri(), folder)
    if "ui.png" in chosen:
        with page_served(folder) as url:
            yield take("ui.png", url, folder)
    if {"live-page.png", "loadtest-page.png"} & chosen:
        yield from loaded(folder, plan)


def loaded(folder: Path, plan: Path) -> Iterator[str]:
    """Serve the plan by the clock, load it, and take the live page and the page of the run."""
    [port] = free_ports(1)
    host = f"http://127.0.0.1:{port}"
    engine = ("--engine", "simulated", "--slowdown", SLOWDOWN, "--port", port)
    run(folder, "serving", "up", plan, *engine)
    command = [str(BIN / "loadtest"), "run", str(plan), "--host", host, *LOAD, "-o", str(folder)]
    load = subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=folder)
    try:
        with opened(f"{host}/", folder / "live") as page:
            resized(page, "live-page.png")
            time.sleep(LIVE_S)
            page.type_into("say", "What does the sea look like in winter?")
            time.sleep(CHAT_S)
            yield shot(page, "live-page.png")
        load.wait(timeout=LOAD_LIMIT_S)
    finally:
        load.kill()
        run(folder, "serving", "down")
    yield take("loadtest-page.png", (folder / "report.html").as_uri(), folder)


def take(name: str, url: str, folder: Path) -> str:
    """Take one picture of a page that needs nothing but time."""
    with opened(url, folder / name) as page:
        resized(page, name)
        return shot(page, name)


def resized(page: Page, name: str) -> None:
    """Give the page the size of its picture, twice as sharp."""
    picture = PICTURES[name]
    size = {"width": picture.width, "height": picture.height}
    page.call("Emulation.setDeviceMetricsOverride", **size, deviceScaleFactor=2, mobile=False)


def shot(page: Page, name: str) -> str:
    """Wait for the answer, write the picture and the hash of what drew it, and return its name."""
    page.wait_for(PICTURES[name].answered)
    time.sleep(1)  # charts are drawn in frames
    taken = page.call("Page.captureScreenshot", format="png")
    (IMAGES / name).write_bytes(base64.b64decode(taken["data"]))
    known = json.loads(HASHES.read_text(encoding="utf-8")) if HASHES.exists() else {}
    known[name] = PICTURES[name].drawers
    HASHES.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return name


@contextmanager
def page_served(folder: Path) -> Iterator[str]:
    """Serve `sizing ui`, and yield its address."""
    [port] = free_ports(1)
    url = f"http://127.0.0.1:{port}/"
    with (folder / "ui.log").open("w") as log:
        server = subprocess.Popen(
            [BIN / "sizing", "ui", "--port", str(port)], stdout=log, stderr=log
        )
    try:
        for _ in range(600):
            try:
                urlopen(f"{url}_stcore/health").close()
                break
            except URLError:
                time.sleep(0.1)
        else:
            raise TimeoutError(f"{url} does not answer: {(folder / 'ui.log').read_text()}")
        yield url
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(timeout=30)


def run(folder: Path, name: str, *arguments: object) -> None:
    """Run one of our commands in a folder of its own, its screen left out."""
    command = [str(BIN / name), *map(str, arguments)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=folder)


if __name__ == "__main__":
    sys.exit(main())
