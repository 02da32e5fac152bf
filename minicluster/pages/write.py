"""A page as HTML in one file, with the script of its charts inside."""

from __future__ import annotations

import base64
import gzip
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minicluster.files import write_atomically

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jinja2 import Environment

    from minicluster.pages.page import Page, Section, Tile

HERE = Path(__file__).parent


def render(page: Page) -> str:
    """
    Return a page as HTML that needs no other file; every word of it is escaped.

    Raises:
        ModuleNotFoundError: Plotly, which charts need, is not installed.
    """
    plotly = _packed_plotly() if page.figures else ""
    return _templates().get_template("page.html.j2").render(page=page, plotly=plotly)


def render_parts(parts: Sequence[Section]) -> str:
    """Return sections as HTML inside another page, without a style sheet."""
    return "".join(_blocks().section(part) for part in parts)


def render_tiles(tiles: Sequence[Tile]) -> str:
    """Return figures likewise."""
    return str(_blocks().tiles(tiles))


def _blocks() -> Any:  # noqa: ANN401  (macros of a template)
    return _templates().get_template("blocks.html.j2").module


def write_page(path: Path, page: Page) -> None:
    """
    Write a page, never in part.

    Raises:
        InputError: a file that cannot be written.
        ModuleNotFoundError: as `render`.
    """
    write_atomically(path, render(page))


@cache
def _packed_plotly() -> str:
    """
    Return Plotly's script as a page holds it: in gzip, which a browser unpacks, and base64.

    It is 2.0 MB so, and 4.8 MB as it stands. The script is that of Plotly's Python package, which
    is not imported.
    """
    package = find_spec("plotly")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("charts need the package plotly", name="plotly")
    script = Path(package.origin).parent / "package_data" / "plotly.min.js"
    return base64.b64encode(gzip.compress(script.read_bytes(), mtime=0)).decode()


@cache
def _templates() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # noqa: PLC0415  (slow)

    return Environment(
        loader=FileSystemLoader(HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
