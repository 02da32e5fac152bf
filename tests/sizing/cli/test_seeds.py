"""Every claim of the seed documents: reproduced, a property, or wrong for a reason that we say."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sizing.cli.app import app

SCRIPTS = Path(__file__).parents[3] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import seeds  # noqa: E402  (a script, beside the packages)

CLAIMS = seeds.claims()


@pytest.mark.parametrize("command", sorted({claim.command for claim in CLAIMS if claim.command}))
def test_claims_hold(command: str) -> None:
    """The command can be typed as it stands; what it prints is within each row's tolerance."""
    assert command.startswith("sizing ")
    done = CliRunner().invoke(app, command.split()[1:])
    assert (done.exit_code, bool(done.stdout)) == (0, True), done.exception
    claims = [claim for claim in CLAIMS if claim.command == command]
    wrong = {each.claim: (each.shown, each.expected_value) for each in claims if not each.holds}
    assert not wrong


def test_no_claim_went_missing() -> None:
    """The claims of all five documents are there, and those that can be computed are."""
    assert len(CLAIMS) > 90
    assert {claim.seed_file for claim in CLAIMS} == {"000", "001", "002", "003", "004"}
    assert all(claim.command and claim.answer for claim in CLAIMS if claim.kind != "context")
    assert all(len(claim.note) > 20 for claim in CLAIMS if claim.kind == "erroneous")


@pytest.mark.parametrize(
    ("value", "expected", "tolerance", "verdict"),
    [
        (1.04, "1", "5%", True),
        (1.06, "1", "5%", False),
        ((0.5, 1.7), "0.86-1.72", "range", False),
        (0.3, "0.116", "<=0.25", False),
        ((98.7, 95.4), "98.7/95.4", ">90", True),
        ((1.0, 2.0), "1", "5%", False),
        (1e9, "4.9e8", "x2", False),
    ],
)
def test_tolerances_can_fail(
    value: float | tuple[float, ...], expected: str, tolerance: str, verdict: bool
) -> None:
    """Each form of the tolerance column accepts and refuses."""
    assert seeds.within(value, expected, tolerance) is verdict
