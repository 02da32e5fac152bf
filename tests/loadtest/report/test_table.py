"""Tables of the terminal: whole where they are 80 columns wide."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

import numpy as np
import pytest
from rich.console import Console

from loadtest.report.compare_page import comparison_table, search_table
from loadtest.report.table import bare_milliseconds, print_client_errors
from loadtest.run.folder import Run
from loadtest.studies.compare import compare_runs
from tests.loadtest.made import CLIENT_ERROR, SEARCH, make_probe, make_run, make_sample


def test_the_clients_error_fits() -> None:
    """Heads, numbers and verdict are all there, the units once a column."""
    out = StringIO()
    worse = replace(CLIENT_ERROR, streams=4567, ttft_error_p99_s=12.345, fit=False, saturated=True)
    slow = replace(CLIENT_ERROR, itl_s=0.0125, ttft_error_p50_s=-0.5, cpu_fraction=1.0, fit=False)
    print_client_errors([CLIENT_ERROR, worse, slow], Console(file=out, width=80))
    title, *lines = out.getvalue().splitlines()

    assert "…" not in out.getvalue()
    assert title.strip() == "client error: measured minus the mock server's own times"
    heads = [line.replace("┃", " ").split() for line in lines[:2]]
    assert " ".join(heads[0]) == "gap events TTFT TTFT ITL TPOT CPU"
    assert " ".join(heads[1]) == "streams ms /s p50 ms p99 ms p99 ms p99 ms % fit"
    rows = [line.replace("│", " ").split() for line in lines[3:6]]
    assert rows[0] == ["200", "20", "9876", "1.23", "12.3", "123", "0.12", "70", "yes"]
    assert rows[1] == ["4567", "20", "9876", "1.23", "12345", "123", "0.12", "70", "SATURATED"]
    assert rows[2] == ["200", "12.5", "9876", "-500", "12.3", "123", "0.12", "100", "NO"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0.00"), (-1e-9, "0.00"), (-0.00123, "-1.23"), (0.0512, "51.2"), (1.234, "1234")],
)
def test_milliseconds_stand_bare_below_their_unit(seconds: float, text: str) -> None:
    """Three digits that matter, and nothing less than nothing."""
    assert bare_milliseconds(seconds) == text


def _run(slower: float) -> Run:
    """Return a run of requests that wait up to that long."""
    waits = slower * np.random.default_rng(1).exponential(0.1, 300)
    return make_run(
        [make_sample(k, k / 30, ttft_s=value, itl_s=0.02 * slower) for k, value in enumerate(waits)]
    )


@pytest.mark.parametrize("slower", [1.0, 100.0])
def test_a_comparison_fits(slower: float) -> None:
    """However far both are apart."""
    runs = (_run(1.0), _run(slower))
    out = StringIO()
    Console(file=out, width=80).print(comparison_table(compare_runs(*runs, ("first", "second"))))

    assert "…" not in out.getvalue()
    assert max(map(len, out.getvalue().splitlines())) <= 80


def test_the_tries_of_a_search_fit() -> None:
    """Rates of thousands, latencies of minutes, and the percentile that they are."""
    missed = replace(
        make_probe(12345.67, holds=False), num_requests=123456, ttft_s=123.4, attained_fraction=1.0
    )
    probes = (missed, replace(missed, holds=None, ttft_s=None, tpot_s=None))
    search = replace(SEARCH, percentile="p99", probes=probes)
    out = StringIO()
    Console(file=out, width=80).print(search_table(search))

    assert "…" not in out.getvalue()
    for part in ("TTFT p99", "TPOT p99", "infinite", "123.4 s", "misses", "unclear"):
        assert part in out.getvalue()
