"""
Print anew what commands of README and docs print: `python scripts/outputs.py [NAME...]`.

A fenced block that begins with one `$ sizing ...` is that command and its output. It is run beside
a plan.json of llama-3.1-70b-h100, and what it prints takes the place of what stood there. Blocks of
several commands, and those that leave something out (`...`), stay as they are and are named.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
SIZING = Path(sys.executable).parent / "sizing"
BLOCK = re.compile(r"^```\n(\$ sizing (?:[^\n]*\\\n)*[^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PLAN = ("plan", "llama-3.1-70b-h100", "-o", "plan.json")
COLUMNS = {"README.md": "80"}
"""Width of a page's outputs; of others `WIDE`."""
WIDE = "110"
LIMIT_S = 600
ANSWERS = (0, 3)
"""Exit codes of an answer, and of a negative one."""


def printed(arguments: list[str], folder: str, columns: str = WIDE) -> str:
    """Return what `sizing` prints on both streams; ends this script where that is no answer."""
    done = subprocess.run(
        [str(SIZING), *arguments],
        cwd=folder,
        env={**os.environ, "COLUMNS": columns, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if done.returncode not in ANSWERS:
        sys.exit(f"sizing {shlex.join(arguments)} ended with {done.returncode}:\n{done.stdout}")
    return "".join(f"{line.rstrip()}\n" for line in done.stdout.splitlines())


def renewed(text: str, folder: str, columns: str) -> tuple[str, list[str], list[str]]:
    """Return a page with new outputs, the commands whose first line changed, and those left."""
    changed: list[str] = []
    left: list[str] = []

    def block(match: re.Match[str]) -> str:
        command, before = match.groups()
        if re.search(r"^\$ |\.\.\.", before, re.MULTILINE) or not before.strip():
            left.append(command)
            return match.group()
        words = shlex.split(command.removeprefix("$ sizing ").replace("\\\n", " "))
        after = printed(words, folder, columns)
        if after.splitlines()[:1] != before.splitlines()[:1]:
            changed.append(command)
        return f"```\n{command}\n{after}```"

    return BLOCK.sub(block, text), changed, left


def main() -> None:
    """Renew the pages that are named, or all."""
    named = [Path(name) for name in sys.argv[1:]]
    pages = named or [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
    with tempfile.TemporaryDirectory() as folder:
        printed([*PLAN], folder)
        for page in pages:
            text, changed, left = renewed(
                page.read_text(encoding="utf-8"), folder, COLUMNS.get(page.name, WIDE)
            )
            page.write_text(text, encoding="utf-8")
            for command in left:
                print(f"{page.name}: left as it is: {command}")
            for command in changed:
                print(f"{page.name}: answers otherwise now: {command}")


if __name__ == "__main__":
    main()
