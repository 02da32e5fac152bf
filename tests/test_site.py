"""The documentation site builds, strictly and without the network."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOWHERE = "http://127.0.0.1:9"
"""A proxy that is not there: every request to the network fails."""
LOADED = re.compile(
    r"""<(?:script|img|iframe)[^>]*\bsrc=["']?https?:|<link[^>]*stylesheet[^>]*https?:"""
)


pytestmark = pytest.mark.site


def test_the_site_builds(tmp_path: Path) -> None:
    """Every page of docs/ is there, no link is broken, and nothing is loaded from elsewhere."""
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    environment |= dict.fromkeys(("http_proxy", "https_proxy", "HTTPS_PROXY"), NOWHERE)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    done = subprocess.run(
        [*command, "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    docs = ROOT / "docs"
    pages = {path.relative_to(docs).with_suffix(".html") for path in docs.rglob("*.md")}
    built = {path.relative_to(tmp_path) for path in tmp_path.rglob("*.html")}
    assert pages <= built
    for page in built:
        text = (tmp_path / page).read_text(encoding="utf-8")
        assert LOADED.search(text) is None, page
