"""
`make setup`: install the CPU stack into `.venv`, and compile what would be compiled at first use.

    python3.11 scripts/setup.py                                # what make demo and make test need
    python3.11 scripts/setup.py requirements/docs.txt          # more, later

uv installs what `requirements/` pins, as pip is configured: its indexes, constraints, folders of
wheels and certificates. Where uv cannot be had, or pip has a setting that has no counterpart in uv,
pip installs, which takes minutes. The simulation is compiled by mypyc while Python
compiles the installed modules, so that both cores have work. Needs only Python and its venv module.
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

VENV = Path(".venv")
PYTHON = VENV / "bin" / "python"
STACK = tuple(f"requirements/{name}.txt" for name in ("torch-cpu", "cpu", "ui", "dev"))

UV = "uv==0.13.9"
"""The installer, from the package index that pip is configured with."""

TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""The PyTorch project's public index, for torch without CUDA where the configured one lacks it."""

IN_UV = {
    "index-url": "--default-index",
    "extra-index-url": "--index",
    "find-links": "--find-links",
    "constraint": "--constraint",
    "trusted-host": "--allow-insecure-host",
}
"""uv's option for each of pip's settings that say where packages come from; all may be repeated."""

VARIABLE_IN_UV = {
    "cert": "SSL_CERT_FILE",
    "client-cert": "SSL_CLIENT_CERT",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "proxy": "ALL_PROXY",
    "timeout": "UV_HTTP_TIMEOUT",
}
"""Environment variable of uv for each of pip's settings that say how to reach an index."""

WITHOUT_EFFECT = {
    "cache-dir",
    "disable-pip-version-check",
    "format",
    "no-color",
    "no-compile",
    "no-input",
    "no-python-version-warning",
    "no-warn-script-location",
    "progress-bar",
    "quiet",
    "require-virtualenv",
    "retries",
    "root-user-action",
    "verbose",
    "version",
}
"""pip's settings that change nothing of what is installed into `.venv`."""

SECTIONS = ("global", "install", ":env:")
"""Sections of pip's configuration that `pip install` reads; a later one replaces an earlier one."""

NOT_COMPILED = r"/(tests?|testing|transformers/models|debugpy)/"
"""Folders of modules that are not compiled now: few of them are ever imported."""


class SetupFailed(Exception):
    """A step of the installation failed; its text is for the user."""


@contextmanager
def timed(step: str) -> Iterator[None]:
    """Print how long a step took."""
    start_s = time.monotonic()
    yield
    print(f"setup: {time.monotonic() - start_s:4.0f} s  {step}", file=sys.stderr, flush=True)


def main() -> int:
    """Install; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[1])
    parser.add_argument("requirements", nargs="*", default=STACK, help="files of pinned packages")
    requirements: Sequence[str] = parser.parse_args().requirements
    whole = requirements is STACK
    try:
        with timed("in all"):
            if not PYTHON.exists():
                with timed(f"environment {VENV} of {sys.executable}"):
                    run([sys.executable, "-m", "venv", str(VENV)])
            with timed("packages"):
                install(requirements)
            if whole:
                with timed("compilation of the simulation and of the packages"):
                    compile_modules()
    except SetupFailed as failed:
        print(f"setup: {failed}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("setup: interrupted; `make setup` goes on where it was", file=sys.stderr)
        return 130
    return 0


def install(requirements: Sequence[str]) -> None:
    """
    Install pinned packages, and our own where the whole stack is installed.

    Raises:
        SetupFailed: no installer and no index gave them; with the last installer's own words.
    """
    files = [part for file in requirements for part in ("-r", file)]
    last_words = ""
    for installer in installers():
        for more in ([], ["--extra-index-url", TORCH_CPU_INDEX]):
            done = attempt([*installer, *more, *files])
            if done is None:
                if requirements is STACK:
                    run([*installer, "--no-build-isolation", "-e", "."])
                return
            last_words = done
    raise SetupFailed(
        f"the packages of {', '.join(requirements)} could not be installed. The installer says:\n"
        f"{last_words}\nAre the package index and the disk in order? `pip config list` shows the"
        " index that is used; `make setup` tries again."
    )


def installers() -> Iterator[list[str]]:
    """Yield commands that install packages without their dependencies, the quicker one first."""
    pip = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "-q"]
    options = uv_options(pip_settings())
    if options is not None and attempt([*pip, "install", UV]) is None:
        uv = [str(VENV / "bin" / "uv"), "pip", "install", "--quiet", "--no-deps"]
        yield [*uv, "--python", str(PYTHON), *options]
    print("setup: pip installs in place of uv: a few minutes", file=sys.stderr, flush=True)
    yield [*pip, "install", "--no-deps"]


def pip_settings() -> dict[str, str]:
    """Return pip's settings by name, from its files and from the environment."""
    done = subprocess.run(
        [str(PYTHON), "-m", "pip", "config", "list"], check=True, capture_output=True, text=True
    )
    read = {section: {} for section in SECTIONS}
    for line in done.stdout.splitlines():
        name, _, value = line.partition("=")
        section, _, key = name.rpartition(".")
        if section in read:
            read[section][key] = str(ast.literal_eval(value))
    return {key: value for section in SECTIONS for key, value in read[section].items()}


def uv_options(settings: dict[str, str]) -> list[str] | None:
    """
    Return pip's settings as options of uv, and set its variables; `None`: uv lacks one of them.

    Several indexes are searched as pip does: the best match of all, not the first index's.
    """
    options = ["--index-strategy", "unsafe-best-match"]
    for key, value in settings.items():
        if key in IN_UV:
            options += [part for one in value.split() for part in (IN_UV[key], one)]
        elif key in VARIABLE_IN_UV:
            os.environ[VARIABLE_IN_UV[key]] = value
        elif key == "no-index":
            options += ["--no-index"] if value.lower() in ("1", "true", "yes", "on") else []
        elif key not in WITHOUT_EFFECT:
            return None
    return options


def compile_modules() -> None:
    """Compile the simulation and, beside it, the modules of the packages."""
    simulation = subprocess.Popen([PYTHON, "scripts/compile_simulation.py"])
    try:
        compileall = ["-m", "compileall", "-q", "-j", str(os.cpu_count()), "-x", NOT_COMPILED]
        # Its exit code does not count: some packages carry templates that are not valid Python.
        packages = next((VENV / "lib").glob("python3.*")) / "site-packages"
        subprocess.run([PYTHON, *compileall, packages], check=False, stdout=subprocess.DEVNULL)
    finally:
        simulation.wait()


def run(command: list[str]) -> None:
    """
    Run a command.

    Raises:
        SetupFailed: it failed; with its own words.
    """
    failure = attempt(command)
    if failure is not None:
        raise SetupFailed(f"`{' '.join(command)}` failed:\n{failure}")


def attempt(command: list[str]) -> str | None:
    """Run a command; return what it printed if it failed, else `None`."""
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True)
    except OSError as error:
        return str(error)
    return (done.stderr or done.stdout).strip() if done.returncode else None


if __name__ == "__main__":
    sys.exit(main())
