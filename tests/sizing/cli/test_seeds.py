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


def name(claim: seeds.Claim) -> str:
    """Name a row in the test report."""
    return f"{claim.seed} {claim.text[:40]}"


@pytest.mark.parametrize(
    "claim", [c for c in CLAIMS if c.kind in ("reproduce", "property")], ids=name
)
def test_claim_holds(claim: seeds.Claim) -> None:
    """Our value, from a public function, is within the row's tolerance."""
    assert claim.command
    assert claim.holds, f"{claim.value} against {claim.expected} ({claim.tolerance})"


@pytest.mark.parametrize("claim", [c for c in CLAIMS if c.kind == "erroneous"], ids=name)
def test_wrong_claim_is_corrected_and_explained(claim: seeds.Claim) -> None:
    """The corrected value holds, and the note says what is wrong."""
    assert claim.holds, f"{claim.value} against {claim.expected}"
    assert len(claim.note) > 20


def test_every_row_is_on_the_page() -> None:
    """The page shows each claim with its seed."""
    page = seeds.page()
    assert len(CLAIMS) > 90
    assert all(seeds.cell(claim.text) in page for claim in CLAIMS)


@pytest.mark.parametrize(
    ("value", "expected", "tolerance", "verdict"),
    [
        (1.04, "1", "5%", True),
        (1.06, "1", "5%", False),
        ((0.9, 1.7), "0.86-1.72", "range", True),
        ((0.5, 1.7), "0.86-1.72", "range", False),
        (0.2, "0.116", "<=0.25", True),
        (0.3, "0.116", "<=0.25", False),
        ((98.7, 95.4), "98.7/95.4", ">90", True),
        (12.5, "11.94", "0.5 pt", False),
        ((1.0, 2.0), "1", "5%", False),
        (5.5e8, "4.9e8", "x2", True),
        (1e9, "4.9e8", "x2", False),
    ],
)
def test_tolerances_can_fail(
    value: float | tuple[float, ...],
    expected: str,
    tolerance: str,
    verdict: bool,
) -> None:
    """Each form of the tolerance column accepts and refuses."""
    assert seeds.within(value, expected, tolerance) is verdict


@pytest.mark.parametrize("command", sorted({claim.command for claim in CLAIMS if claim.command}))
def test_commands_of_the_page_run(command: str) -> None:
    """What the page names as our command can be typed as it stands."""
    program, *arguments = command.strip("`").split()
    assert program == "sizing"
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.exception
    assert done.stdout
