"""A page as HTML in a file, with Plotly's script beside it."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from minicluster.errors import InputError, MiniclusterError
from minicluster.files import write_atomically

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jinja2 import Environment

    from minicluster.pages.page import Page, Section, Tile

SCRIPT = "plotly.min.js"  # name of the file that draws the charts; all pages of a folder share it
STDOUT = 1  # file descriptor of the standard output
HERE = Path(__file__).parent


def render(page: Page, script: str = SCRIPT) -> str:
    """
    Return a page as HTML; every word of it is escaped.

    Args:
        script: where Plotly's script lies, as the page's `src` has it.
    """
    return _templates().get_template("page.html.j2").render(page=page, script=script)


def render_parts(parts: Sequence[Section]) -> str:
    """Return sections as HTML inside another page, without a style sheet."""
    return "".join(_blocks().section(part) for part in parts)


def render_tiles(tiles: Sequence[Tile]) -> str:
    """Return figures likewise."""
    return str(_blocks().tiles(tiles))


def _blocks() -> Any:  # noqa: ANN401  (macros of a template)
    return _templates().get_template("blocks.html.j2").module


def write_page(path: Path, page: Page, *, script_folder: Path | None = None) -> None:
    """
    Write a page, never in part, and Plotly's script unless it is there or no chart needs it.

    *script_folder* is where the script lies; `None`: beside the page, which is why the page is a
    file, and no stream.

    Raises InputError: a file that cannot be written.
    """
    folder = path.parent if script_folder is None else script_folder
    if _is_stream(path):
        raise InputError(
            str(path), "a stream", f"a file to write a page to, with {SCRIPT} beside it"
        )
    address = quote(Path(os.path.relpath(folder / SCRIPT, path.parent)).as_posix())
    html = render(page, address)
    if page.figures:
        _keep_script(folder / SCRIPT)
    write_atomically(path, html)


def plotly_script() -> Path:
    """Return Plotly's script as its Python package, which is not imported, ships it, or refuse."""
    package = find_spec("plotly")
    if package is None or package.origin is None:
        raise MiniclusterError("charts need the package plotly: `pip install -e .` installs it")
    return Path(package.origin).parent / "package_data" / SCRIPT


def _is_stream(path: Path) -> bool:
    if not path.exists():
        return False
    return not path.is_file() or os.path.samestat(path.stat(), os.fstat(STDOUT))


def _keep_script(path: Path) -> None:
    content = plotly_script().read_text(encoding="utf-8")
    if not (path.is_file() and path.read_bytes() == content.encode()):
        write_atomically(path, content)


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
