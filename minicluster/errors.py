"""
The errors that commands report in one line, and their exit codes.

    MiniclusterError          1  our bug, unless a subclass says otherwise
    ├── InputError            2  bad usage, scenario, catalog entry or plan
    ├── NegativeAnswer        3  infeasible, SLO missed, not realisable, deployed ≠ planned
    ├── Inconclusive          4  the run proves nothing either way; says what is needed
    └── TargetFailed          5  the endpoint or the cluster failed under us
"""

from __future__ import annotations

import json
from enum import IntEnum


class Exit(IntEnum):
    """Exit codes of all three commands."""

    DONE = 0
    BUG = 1
    BAD_INPUT = 2
    NEGATIVE = 3
    INCONCLUSIVE = 4
    TARGET_FAILED = 5
    INTERRUPTED = 130


class MiniclusterError(Exception):
    """
    An error that is reported in one line instead of a traceback.

    Args:
        answered: whether the command has printed its whole answer as JSON, the reasons in it.
    """

    exit_code: Exit = Exit.BUG

    def __init__(self, message: str, *, answered: bool = False) -> None:
        super().__init__(message)
        self.answered = answered


class Fault(str):
    """What is wrong with an input, as the rest of a sentence about it: `cannot be read: …`."""

    __slots__ = ()


SET = Fault("is set")  # the fault of a value that does not matter where none is expected


def unreadable(error: OSError) -> Fault:
    """Say why a file cannot be read."""
    if isinstance(error, FileNotFoundError):
        return Fault("does not exist")
    return Fault(f"cannot be read: {error.strerror}")


def unwritable(error: OSError) -> Fault:
    """Say why a file or folder cannot be written."""
    return Fault(f"cannot be written: {error.strerror}")


KINDS = {"list": "a list", "str": "a text", "bool": "true or false", "NoneType": "null"}
"""What JSON calls the values of Python's types; others are numbers."""


def wrong_kind(value: object) -> Fault:
    """Say what kind of value stands where an object of JSON is expected."""
    return Fault(f"is {KINDS.get(type(value).__name__, 'a number')}")


LONGEST_VALUE = 200  # characters of a value that a message repeats


def written(value: object) -> str:
    """Write a value as TOML or JSON would, and no more of it than one reads."""
    if isinstance(value, bool | list | tuple | dict):
        text = json.dumps(value, ensure_ascii=False, default=str)
    elif isinstance(value, str | int | float):
        text = repr(value)
    else:
        text = repr(str(value))
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}…"


EXTRAS = {
    "plotly": "",
    **dict.fromkeys(("streamlit", "altair"), "ui"),
    **dict.fromkeys(("locust", "gevent", "geventhttpclient"), "loadtest"),
    **dict.fromkeys(("psutil", "ray", "vllm", "torch", "transformers", "nixl"), "cpu"),
    **dict.fromkeys(("aiohttp", "fastapi", "grpc", "starlette", "uvicorn", "tokenizers"), "cpu"),
    **dict.fromkeys(("h11", "prometheus_client", "safetensors"), "cpu"),
}
"""Extra of `pyproject.toml` that brings a package; empty: every install has the package."""


def missing_package(name: str | None) -> InputError | None:
    """Return the error for a package of ours that is not installed; `None`: it is none of ours."""
    extra = EXTRAS.get((name or "").partition(".")[0])
    if extra is None:
        return None
    or_gpu = ", or gpu on a machine with GPUs" if extra == "cpu" else ""
    brought = f"installed with the extra {extra}{or_gpu}" if extra else "installed with minicluster"
    source = f"REPOSITORY[{extra}]" if extra else "REPOSITORY"
    way_out = f"pip install '{source}', where minicluster was installed from"
    return InputError(f"the package {name}", Fault("is not installed"), brought, way_out)


class InputError(MiniclusterError):
    """
    Input that cannot be used.

    Args:
        place: file and key, for example `laptop.toml: slo.ttft_s`.
        value: what stands there, or a `Fault` of it; `None` where nothing stands.
        expectation: what has to stand there.
        way_out: what the user can do, if that is not obvious.
    """

    exit_code = Exit.BAD_INPUT

    def __init__(
        self, place: str, value: object, expectation: str, way_out: str | None = None
    ) -> None:
        self.place = place
        self.value = value
        self.expectation = expectation
        self.way_out = way_out
        tail = f" ({way_out})" if way_out else ""
        super().__init__(f"{place} {self.found}{self._needed}{tail}")

    def __reduce__(self) -> tuple[type[InputError], tuple[object, ...]]:
        """Pickle what it was made of: workers raise it, too."""
        return InputError, (self.place, self.value, self.expectation, self.way_out)

    @property
    def found(self) -> str:
        """What stands there, as the rest of a sentence."""
        if self.value is None:
            return "is missing"
        return self.value if isinstance(self.value, Fault) else f"is {written(self.value)}"

    @property
    def _needed(self) -> str:
        """What has to stand there, as the end of the sentence that `found` begins."""
        if self.expectation.startswith("no such "):
            return f", but there is {self.expectation}"
        if self.expectation.startswith("no "):
            return f", but there can be {self.expectation}"
        return f"; it has to be {self.expectation}"

    def inside(self, place: str) -> InputError:
        """Return the same error of a key that stands in *place*, such as a file."""
        where = f"{place}: {self.place}"
        return InputError(where, self.value, self.expectation, self.way_out)


class NegativeAnswer(MiniclusterError):
    """The answer is no, with its reasons, one a line."""

    exit_code = Exit.NEGATIVE


class Inconclusive(MiniclusterError):
    """The run proves nothing either way; the message says what is needed."""

    exit_code = Exit.INCONCLUSIVE


class TargetFailed(MiniclusterError):
    """The endpoint or the cluster failed; partial results are kept."""

    exit_code = Exit.TARGET_FAILED
