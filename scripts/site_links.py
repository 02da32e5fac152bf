"""Hook of mkdocs: links from docs/ into the code, which the site does not hold, become text."""

from __future__ import annotations

import re

CODE = re.compile(r"\[([^\]]+)\]\(\.\./(?:minicluster|sizing|serving|loadtest)/[^)]*\)")


def on_page_markdown(markdown: str, **_: object) -> str:
    """Return the page with `path` in place of [path](../package/path)."""
    return CODE.sub(r"`\1`", markdown)
