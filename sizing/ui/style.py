"""The page kit's style sheet and colours, inside another page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import minicluster.pages
from minicluster.pages.write import render_parts

if TYPE_CHECKING:
    from minicluster.pages.page import Section

CSS = (Path(minicluster.pages.__file__).parent / "page.css").read_text(encoding="utf-8")
OWN = """
.stMainBlockContainer { padding-top: 2.5rem; }
h1 { font-size: 2rem !important; padding-top: 0 !important; }
.kit { background: none; }
.kit .tiles { margin: 0; grid-template-columns: 1fr; }
.kit .tile { min-height: 92px; }
.kit section { padding: 10px 0; margin: 0; border: 0; background: none; overflow-x: auto; }
.kit td, .kit th { padding: 4px 8px; font-size: 14px; }
.kit th { white-space: pre-line; }
"""
STYLE = ".kit {" + CSS.replace(":root", "&").replace("body {", "& {") + "}" + OWN
"""Rules of page.css for everything inside an element of class `kit`, and for nothing else."""

COLOUR = re.compile(r"var\((--[a-z]+)\)")


def kit(*parts: Section) -> str:
    """Return sections as HTML that `STYLE` fits."""
    return f'<div class="kit">{render_parts(parts)}</div>'


def palette(*, dark: bool) -> dict[str, str]:
    """Return the colours of the style sheet by name."""
    light_text, _, dark_text = CSS.partition("@media (prefers-color-scheme: dark)")
    return dict(re.findall(r"(--[a-z]+): (#[0-9a-f]{6})", dark_text if dark else light_text))


def coloured(value: Any, colours: dict[str, str]) -> Any:  # noqa: ANN401  (parts of a chart)
    """Return a part of a chart with colours in place of their names."""
    if isinstance(value, dict):
        return {key: coloured(each, colours) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [coloured(each, colours) for each in value]
    found = COLOUR.fullmatch(value) if isinstance(value, str) else None
    return colours[found[1]] if found else value
