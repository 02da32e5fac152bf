"""The page at `/`: one HTML file that loads nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

PAGE = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")


def _hashes(tag: str) -> str:
    """Return what the content security policy wants to hear of the inline *tag*s."""
    parts = re.findall(rf"<{tag}>(.*?)</{tag}>", PAGE, re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() for part in parts)
    return " ".join(f"'sha256-{digest}'" for digest in digests)


PAGE_HEADERS = {
    "Content-Security-Policy": (
        f"default-src 'none'; script-src {_hashes('script')}; style-src {_hashes('style')}; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
"""Nothing runs on the page but what is in the file: text of a model is never code."""
