"""The three commands answer help, usage errors and completion from tables, and import the rest."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from importlib import import_module
from importlib.metadata import version
from itertools import pairwise

import pytest
import typer

PROGRAMS = ("sizing", "serving", "loadtest")
APPS = {name: import_module(f"{name}.cli.app") for name in PROGRAMS}
ENTRIES = [
    (program, name, where, line)
    for program, each in APPS.items()
    for listed in each.COMMANDS.values()
    for name, (where, line) in listed.items()
]
HEAVY = {"aiohttp", "jinja2", "locust", "numpy", "plotly", "ray", "streamlit", "torch", "vllm"}
RUN = """
import sys
from {program}.cli import main
try:
    main()
finally:
    print("imported:", *sorted({heavy} & {{*sys.modules}}), file=sys.stderr)
"""


def answered(program: str, *arguments: str, **environment: str) -> tuple[int, str, str]:
    """Run a command that has to import nothing heavy; return exit code, stdout and stderr."""
    # Typer converts values by pydantic; help, a wrong command and a wrong option have none.
    valued = program != "sizing" or "COMP_WORDS" in environment
    code = RUN.format(program=program, heavy=HEAVY | (set() if valued else {"pydantic"}))
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "COLUMNS": "80", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    said, _, found = done.stderr.rpartition("imported:")
    assert found.strip() == ""
    return done.returncode, done.stdout, said


def completed(line: str) -> list[str]:
    """Return what bash offers in place of the last word of a line."""
    program, *words = line.split(" ")
    environment = {
        f"_{program.upper()}_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words)),
    }
    code, offered, _ = answered(program, **environment)
    assert code == 0
    return offered.split()


@pytest.mark.parametrize(("program", "name", "where", "line"), ENTRIES)
def test_the_help_of_all_says_what_the_help_of_one_begins_with(
    program: str, name: str, where: str, line: str
) -> None:
    """The table and a command's docstring cannot drift apart; a group has its help in its app."""
    module, _, attribute = where.partition(":")
    found = getattr(import_module(f"{program}.cli.{module}"), attribute)
    text = found.info.help if isinstance(found, typer.Typer) else inspect.getdoc(found)
    assert " ".join(text.partition("\n\n")[0].split()) == line, name


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_lists_every_command_under_its_heading(program: str) -> None:
    """Whole at 80 columns, in the order of the table."""
    code, told, _ = answered(program, "--help")
    lines = told.splitlines()
    assert code == 0
    assert max(map(len, lines)) == 80
    assert "…" not in told
    expected = [
        start
        for heading, listed in APPS[program].COMMANDS.items()
        for start in (f"╭─ {heading} ─", *(f"│ {name} " for name in listed))
    ]
    at = [next(i for i, each in enumerate(lines) if each.startswith(start)) for start in expected]
    assert all(before < after for before, after in pairwise(at))


@pytest.mark.parametrize(("program", "name"), [entry[:2] for entry in ENTRIES])
def test_help_of_a_command_imports_no_heavy_module(program: str, name: str) -> None:
    """It fits 80 columns, and cuts no option and no word in brackets."""
    code, told, _ = answered(program, name, "--help")
    assert code == 0
    assert f"Usage: {program} {name}" in told
    assert max(map(len, told.splitlines())) <= 80
    assert "…" not in told


@pytest.mark.parametrize("program", PROGRAMS)
def test_version(program: str) -> None:
    assert answered(program, "--version")[:2] == (0, f"minicluster {version('minicluster')}\n")


@pytest.mark.parametrize(
    ("line", "absent", "extra"),
    [
        ("serving status", "psutil", "cpu, or gpu on a machine with GPUs"),
        ("serving demo-model --dtype fp32", "safetensors", "cpu, or gpu"),
        ("sizing ui", "streamlit", "ui"),
        ("loadtest selftest", "locust", "loadtest"),
    ],
)
def test_a_package_of_an_extra_that_is_absent_is_named(line: str, absent: str, extra: str) -> None:
    """One line and exit code 2, as after `pip install` without extras."""
    program, *arguments = line.split()
    code = (
        "import sys, importlib.util as u; find = u.find_spec\n"
        f"u.find_spec = lambda name, *rest: None if name == {absent!r} else find(name, *rest)\n"
        f"sys.modules[{absent!r}] = None; from {program}.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert (
        f"the package {absent} is not installed; it has to be installed with the extra {extra}"
        in (done.stderr)
    )


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("sizing plna", "sizing: No such command 'plna'. Did you mean 'plan', 'place'?"),
        ("sizing plan --nonsense", "sizing: No such option: --nonsense"),
        ("serving up", "serving: Missing argument 'plan'."),
        ("loadtest run --rate x", "loadtest: Invalid value for '--rate'"),
    ],
)
def test_a_usage_error_is_one_line_and_imports_no_heavy_module(line: str, says: str) -> None:
    code, told, said = answered(*line.split())
    assert (code, told, said.count("\n")) == (2, "", 1)
    assert said.startswith(says)


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("sizing pl", ["plan", "place"]),
        ("sizing fabric b", ["bom"]),
        ("sizing train --zer", ["--zero"]),
        ("serving sc", ["scale"]),
        ("serving up --tls", ["--tls-cert", "--tls-key"]),
        ("loadtest sel", ["selftest"]),
        ("loadtest run --inp", ["--input-tokens"]),
        ("sizing --sh", ["--show-completion"]),
    ],
)
def test_completion_offers_commands_and_options(line: str, offered: list[str]) -> None:
    assert completed(line) == offered


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_completion_that_bash_reads_calls_the_command(program: str) -> None:
    code, script, _ = answered(program, **{f"_{program.upper()}_COMPLETE": "source_bash"})
    assert code == 0
    assert f"complete -o default -F _{program}_completion {program}" in script
