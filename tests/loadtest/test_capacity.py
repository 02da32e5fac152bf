from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.capacity import Probe, capacity, next_rate
from loadtest.search import Search, go_on, resumed, to_json
from sizing.errors import Exit, InputError
from sizing.plan import to_json as plan_json
from sizing.specs.slo import SloSpec

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import PlanMaker, ServerStarter


def probe(rate: float, holds: bool | None) -> Probe:  # noqa: FBT001
    """Return a try."""
    return Probe(
        requests_per_s=rate,
        num_requests=100,
        verdict="met" if holds else "missed",
        holds=holds,
        attained_fraction=1.0 if holds else 0.5,
        good_requests_per_s=rate,
        ttft_s=0.1,
        tpot_s=0.01,
        folder="try",
    )


@given(st.floats(0.5, 100), st.floats(0.2, 5), st.sampled_from([0.05, 0.1, 0.3]))
def test_the_limit_is_found_wherever_it_is(first: float, ratio: float, resolution: float) -> None:
    """A sharp limit is bracketed to the resolution, in few tries."""
    limit, probes = first * ratio, []
    while (rate := next_rate(probes, first=first, resolution_fraction=resolution)) is not None:
        probes.append(probe(rate, rate <= limit))
        assert len(probes) < 20
    found = capacity(probes)

    assert found.low is not None
    assert found.high is not None
    assert found.low <= limit < found.high <= found.low * (1 + resolution)
    assert found.requests_per_s == pytest.approx(limit, rel=resolution)


def test_a_rate_that_nothing_tells_about_is_the_limit() -> None:
    """Where the longest run allowed is inconclusive, the load is on the edge: the search ends."""
    probes = [probe(8, holds=True), probe(10, holds=None)]

    assert next_rate(probes, first=8, resolution_fraction=0.1) is None
    assert capacity(probes).requests_per_s == 10


def test_nothing_is_out_of_reach_for_ever() -> None:
    """An SLO that no load holds, or any, ends the search."""
    for holds in (True, False):
        probes: list[Probe] = []
        while (rate := next_rate(probes, first=10, resolution_fraction=0.1)) is not None:
            probes.append(probe(rate, holds))
        assert len(probes) < 20
        assert (capacity(probes).requests_per_s is None) == (not holds)


SEARCH = Search(
    host="http://127.0.0.1:1",
    inputs_hash="0",
    percentile="p50",
    first_requests_per_s=8.0,
    resolution_fraction=0.1,
    most_requests=100,
    predicted_requests_per_s=10.0,
    saturation_requests_per_s=12.0,
    probes=(probe(8, holds=True), probe(10, holds=False), probe(9, holds=True)),
)


def test_a_search_goes_on_where_it_was(tmp_path: Path) -> None:
    """What was tried is not tried again; a search of something else is refused."""
    (tmp_path / "search.json").write_text(to_json(SEARCH))
    fresh = json.loads(to_json(SEARCH)) | {"probes": ()}

    assert resumed(Search(**fresh), tmp_path) == SEARCH
    tried = []

    def measure(rate: float, num: int, name: str) -> None:
        tried.append((rate, num, name))
        raise InterruptedError

    with pytest.raises(InterruptedError):
        go_on(SEARCH, measure, tmp_path)  # type: ignore[arg-type,return-value]
    assert tried[0][0] == pytest.approx((9 * 10) ** 0.5)
    with pytest.raises(InputError):
        resumed(Search(**fresh | {"host": "http://other"}), tmp_path)
    (tmp_path / "search.json").write_text("{")
    with pytest.raises(InputError):
        resumed(Search(**fresh), tmp_path)


def search(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run `loadtest search`."""
    command = [sys.executable, "-c", "from loadtest.cli import main; main()", "search"]
    return subprocess.run(
        [*command, *map(str, arguments)], capture_output=True, text=True, timeout=240, check=False
    )


def test_a_server_with_so_many_slots(
    start_server: ServerStarter, make_plan: PlanMaker, tmp_path: Path
) -> None:
    """A server of 8 slots and 0.2 s a request holds 40 requests/s: found, compared, resumed."""
    host = start_server(ttft_s=0.05, itl_s=0.015, slots=8)
    slo = SloSpec(ttft_s=0.5, tpot_s=None, percentile="p50")
    plan = tmp_path / "plan.json"
    plan.write_text(plan_json(make_plan(rate=30.0, num_output=11, slo=slo)))
    out = tmp_path / "search"
    options = ["--host", host, "--warmup", "2", "--most-requests", "200", "-o", out]
    done = search(plan, *options, "--resolution", "0.3", "--json")
    again = search(plan, *options, "--resolution", "0.3")

    found = json.loads(done.stdout)
    assert done.returncode in {Exit.DONE, Exit.INCONCLUSIVE}, done.stderr
    limit = [p["requests_per_s"] for p in found["probes"] if p["holds"] is not True]
    assert 30 < min(limit) < 65
    assert "resumed after" in again.stderr
    assert again.returncode == done.returncode
    assert "<svg" in (out / "search.html").read_text()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--resolution", "0"], "--resolution"),
        (["--first", "-1"], "--first"),
        (["--most-requests", "3"], "--most-requests"),
        (["--tolerance", "-1"], "--tolerance"),
        (["--host", "http://127.0.0.1:9"], "nothing answers"),
    ],
)
def test_bad_options_are_refused(
    make_plan: PlanMaker, tmp_path: Path, options: list[str], says: str
) -> None:
    """One line: what it was, and what it has to be."""
    plan = tmp_path / "plan.json"
    plan.write_text(plan_json(make_plan()))
    done = search(plan, *options, "-o", tmp_path / "out")

    assert done.returncode in {Exit.BAD_INPUT, Exit.TARGET_FAILED}
    assert says in done.stderr
    assert "Traceback" not in done.stderr
