"""Pages as a browser reads them."""

from __future__ import annotations

import json
import re
from typing import Any


def figures_in(html: str) -> list[dict[str, Any]]:
    """Return the charts of a page, traces and layout."""
    found = re.findall(r'<script type="application/json">(.*?)</script>', html, re.DOTALL)
    return [json.loads(each) for each in found]
