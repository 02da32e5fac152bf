"""
The errors that commands report in one line, and their exit codes.

    MiniclusterError          1  our bug, unless a subclass says otherwise
    ├── InputError            2  bad usage, scenario, catalog entry or plan
    ├── NegativeAnswer        3  infeasible, SLO missed, not realisable, deployed ≠ planned
    ├── Inconclusive          4  the run proves nothing either way; says what is needed
    └── TargetFailed          5  the endpoint or the cluster failed under us
"""

from __future__ import annotations

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
    """An error that is reported in one line instead of a traceback."""

    exit_code: Exit = Exit.BUG


class InputError(MiniclusterError):
    """
    Input that cannot be used.

    Args:
        place: file and key, for example `laptop.toml: slo.ttft_s`.
        value: what stands there; `None` where nothing does.
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
        found = "is missing" if value is None else f"is {value!r}"
        tail = f" ({way_out})" if way_out else ""
        super().__init__(f"{place} {found}; expected {expectation}{tail}")

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
