"""What the docstring of a spec says of each key."""

from __future__ import annotations

import inspect
import re


def attribute_docs(cls: type) -> dict[str, str]:
    """Read the `Attributes:` section of a docstring: name to meaning."""
    text = inspect.getdoc(cls) or ""
    _, _, section = text.partition("Attributes:\n")
    entries = re.findall(r"^    (\w+): (.*(?:\n        .*)*)", section, flags=re.MULTILINE)
    return {name: " ".join(meaning.split()) for name, meaning in entries}
