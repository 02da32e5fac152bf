"""The page of `sizing ui`, run by Streamlit without a browser."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import sizing.ui

if TYPE_CHECKING:
    from streamlit.testing.v1 import AppTest

PAGE = Path(sizing.ui.__file__).parent / "page.py"
MIX = "chat-and-summaries-8b"
QUICK = {"workload.requests_per_s": "2", "search.pools": "mixed"}
FEW = {
    "scenario": MIX, "search.pools": "mixed",
    "workload.classes.0.requests_per_s": "8", "workload.classes.1.requests_per_s": "2",
}  # fmt: skip
"""A mix that is planned within seconds."""


def opened(query: dict[str, str] | None = None) -> AppTest:
    """Open the page at an address."""
    from streamlit.testing.v1 import AppTest  # noqa: PLC0415  (a second of every worker)

    page = AppTest.from_file(PAGE, default_timeout=120)
    for name, value in (query or {}).items():
        page.query_params[name] = value
    page.run()
    assert not page.exception
    return page


def write(page: AppTest, texts: dict[str, str]) -> None:
    """Type into fields, and press Plan."""
    for key, text in texts.items():
        page.get_by_key(key).set_value(text)
    page.get_by_key("plan").click()
    page.run()
    assert not page.exception, page.exception[0].value


def press(page: AppTest, label: str) -> None:
    next(each for each in page.button if each.label == label).click()
    page.run()
    assert not page.exception


def shown(page: AppTest) -> str:
    """Return all tables and notes of a page, without the attributes of cells."""
    text = " ".join(each.value for each in page.html if 'class="kit' in each.value)
    return re.sub(r"<(t[dh]) [^>]*>", r"<\1>", text)


def drop(page: AppTest, key: str, name: str, content: str) -> None:
    """Drop a file in; it is read at once."""
    page.get_by_key(key).set_value((name, content.encode(), "text/plain")).run()
