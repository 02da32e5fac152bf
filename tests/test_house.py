"""The house as a whole: what is shipped, what is generated, what is promised in prose."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tomllib
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("minicluster", "sizing", "serving", "loadtest")


def test_wheel_holds_the_packages_and_the_catalogs(tmp_path: Path) -> None:
    """An installed wheel finds its catalogs, and puts nothing else at the top level."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    [wheel] = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()

    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {
        "minicluster",
        "sizing",
        "serving",
        "loadtest",
    }
    configs = {f"sizing/_configs/{p.relative_to(ROOT / 'configs')}" for p in catalog_files()}
    assert configs <= set(names)


def catalog_files() -> list[Path]:
    return sorted((ROOT / "configs").rglob("*.toml"))


def test_generated_pages_are_current() -> None:
    """`make docs` would change nothing."""
    done = subprocess.run(
        [sys.executable, "scripts/docs.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("command", ["sizing", "serving", "loadtest"])
def test_a_wrong_option_is_answered_with_where_help_is(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the one line names does show it."""
    main = importlib.import_module(f"{command}.cli").main
    for option, code, says in (("--wrong", 2, f"`{command} -h` shows how"), ("-h", 0, "Usage: ")):
        monkeypatch.setattr(sys, "argv", [command, option])
        with pytest.raises(SystemExit) as left:
            main()
        assert left.value.code == code
        assert says in "".join(capsys.readouterr())


def test_changelog_tells_of_this_version() -> None:
    """The newest version of the changelog is that of pyproject.toml; what follows is unreleased."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    headings = re.findall(r"^## \[([^\]]+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert next(name for name in headings if name != "Unreleased") == version


@pytest.mark.parametrize(
    ("page", "lines", "words"),
    [
        ("README.md", 150, 1900),
        ("CHANGELOG.md", 125, 1900),
        ("docs/index.md", 60, 700),
        ("docs/model.md", None, 18_000),
        ("docs/validation.md", 120, 1900),
    ],
)
def test_a_page_is_short(page: str, lines: int | None, words: int) -> None:
    """A newcomer reads so much, not more: what grows beyond it has to replace something."""
    text = (ROOT / page).read_text(encoding="utf-8")
    assert len(text.split()) <= words
    assert lines is None or len(text.splitlines()) <= lines


def test_a_decision_is_a_page() -> None:
    """Context, decision and consequences in 45 lines."""
    pages = (ROOT / "docs" / "adr").glob("*.md")
    counts = {page.name: len(page.read_text(encoding="utf-8").splitlines()) for page in pages}
    assert {name: count for name, count in counts.items() if count > 45} == {}


def test_a_bullet_of_the_model_is_short() -> None:
    """An equation and what belongs to it: 300 characters, then another bullet."""
    bullets = re.findall(r"^ *- (.+)$", (ROOT / "docs" / "model.md").read_text(), re.MULTILINE)
    assert [bullet for bullet in bullets if len(bullet) > 300] == []


def test_the_changelog_has_one_heading_of_each_kind() -> None:
    """In each version, and none of the words that CONTRIBUTING.md replaces."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    for version in re.split(r"^## \[", text, flags=re.MULTILINE)[1:]:
        kinds = re.findall(r"^### (.+)$", version, re.MULTILINE)
        assert len(kinds) == len(set(kinds))
    assert re.findall(r"\b(?:front door|guard|turning away|nobody|somebody)\b", text) == []


def test_no_file_names_a_registry_or_a_machine() -> None:
    """Of all package sources, only the PyTorch project's CPU index is named."""
    tracked = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\0")
    hosts = re.compile(r"https?://([a-z0-9.-]*(?:pypi|index|registry|download)[a-z0-9.-]*)")
    found = set()
    for name in filter(None, tracked):
        path = ROOT / name
        if path.is_file() and path.suffix != ".png":
            found |= set(hosts.findall(path.read_text(encoding="utf-8", errors="ignore")))
    assert found <= {"download.pytorch.org"}


def sources() -> dict[str, ast.Module]:
    """Parse the packages: module to tree."""
    files = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): ast.parse(
            path.read_text()
        )
        for path in files
    }


def test_pydantic_is_at_the_edge() -> None:
    """It reads our files in one module; all others that import it are of serving."""
    users = {
        module
        for module, tree in sources().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "pydantic"
    }
    assert {module for module in users if not module.startswith("serving.")} == {
        "minicluster.config"
    }


def test_no_class_name_twice() -> None:
    nodes = (node for tree in sources().values() for node in ast.walk(tree))
    names = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    assert [name for name, count in names.items() if count > 1] == []


def origins(tree: ast.Module, defined: dict[str, set[str]]) -> Iterator[tuple[str, str]]:
    """Yield each name of ours that a module imports or calls, and the module that defines it."""
    nodes = list(ast.walk(tree))
    modules = {}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module in defined:
            for name in (alias.name for alias in node.names):
                modules[name] = f"{node.module}.{name}"
                if name in defined[node.module]:
                    yield name, node.module
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = modules.get(node.value.id, "")
            if node.attr in defined.get(module, ()):
                yield node.attr, module


def test_no_module_sees_two_meanings_of_a_name() -> None:
    """A function or class of ours that a module defines, imports or calls is the only one there."""
    trees = sources()
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    defined = {
        module: {node.name for node in tree.body if isinstance(node, kinds)}
        for module, tree in trees.items()
    }
    twice = []
    for module, tree in trees.items():
        # A command is named as users type it, and often as what it calls.
        own = {(name, module) for name in defined[module] if ".cli." not in module}
        names = Counter(name for name, _ in own | set(origins(tree, defined)) if name[0] != "_")
        twice += [f"{module}: {name}" for name, count in names.items() if count > 1]
    assert twice == []
