from __future__ import annotations

import heapq
import json
import math
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.cli.studies import _exit
from loadtest.client import launch
from loadtest.report.compare_page import search_lines
from loadtest.run.folder import as_json
from loadtest.studies.capacity_search import capacity, next_rate, resume_search, run_search
from minicluster.errors import Exit, Inconclusive, InputError
from minicluster.specs.slo import SloSpec
from minicluster.workload.schedule import read_schedule
from tests.loadtest.command import ServerStarter, loadtest
from tests.loadtest.made import SEARCH as FRESH
from tests.loadtest.made import leave, make_plan, make_probe, make_sample, plan_json


@given(
    st.floats(0.5, 100),
    st.floats(0.2, 5),
    st.just(0.0) | st.floats(0, 0.5),
    st.sampled_from([0.01, 0.05, 0.1, 0.3]),
    st.randoms(use_true_random=False),
)
def test_the_limit_is_bracketed_wherever_it_is(
    first: float, ratio: float, blur: float, resolution: float, chance: Random
) -> None:
    """Where many runs near the limit tell nothing, both sides are narrowed, and hold the truth."""
    limit, probes = first * ratio, []
    while (rate := next_rate(probes, first=first, resolution_fraction=resolution)) is not None:
        near = limit / (1 + blur) < rate < limit * (1 + blur)
        silent = near and chance.random() < 0.7
        probes.append(make_probe(rate, holds=None if silent else rate <= limit))
        assert len(probes) < (40 if blur else 25)
    found = capacity(probes)

    assert found.low <= limit < found.high
    assert found.high <= found.low * (1 + blur) ** 2 * (1 + resolution) * (1 + 1e-9)
    assert found.within(resolution) or found.unclear
    assert found.middle == pytest.approx(math.sqrt(found.low * found.high))


SEARCH = replace(
    FRESH,
    probes=(make_probe(8, holds=True), make_probe(10, holds=False), make_probe(9, holds=True)),
)


def test_a_search_goes_on_where_it_was(tmp_path: Path) -> None:
    """What was tried is not tried again; a search of something else is refused."""
    (tmp_path / "search.json").write_text(as_json(SEARCH))

    assert resume_search(FRESH, tmp_path) == SEARCH
    tried = []

    def measure(rate: float, num: int, name: str) -> Any:  # noqa: ANN401
        tried.append((rate, num, name))
        raise InterruptedError

    for most_requests in (100, 40):
        with pytest.raises(InterruptedError):
            run_search(replace(SEARCH, most_requests=most_requests), measure, tmp_path)
    assert [(num, name) for _, num, name in tried] == [(47, "try-4"), (40, "try-4")]
    assert tried[0][0] == pytest.approx((9 * 10) ** 0.5)
    for other in (replace(FRESH, host="http://other"), replace(FRESH, most_requests=99)):
        with pytest.raises(InputError, match="another search"):
            resume_search(other, tmp_path)
    (tmp_path / "search.json").write_text("{")
    with pytest.raises(InputError):
        resume_search(FRESH, tmp_path)


def answer(word: str, rate: float, **more: Any) -> Any:  # noqa: ANN401
    """Return a verdict as far as a search looks at it."""
    needs = {"needed": None, "counted": 47, "settled": True} | more
    result = SimpleNamespace(
        metric="ttft",
        measured_s=0.1,
        attained_fraction=0.9,
        verdict="inconclusive" if word == "inconclusive" else "met",
        num_needed=needs["needed"],
        num_requests=needs["counted"],
    )
    return SimpleNamespace(
        verdict=word,
        reasons=(f"{word} it is",),
        slo=(result,),
        throughput=SimpleNamespace(good_requests_per_s=rate),
        window=SimpleNamespace(settled=needs["settled"]),
    )


def test_more_requests_narrow_what_a_search_found(tmp_path: Path) -> None:
    """Resumed with longer tries, those that told nothing are made again, from where they were."""
    tried: list[tuple[str, int]] = []

    def endpoint(rate: float, num: int, name: str) -> Any:  # noqa: ANN401
        """Hold the SLO up to 10 requests/s; n requests tell so at rates 3 / sqrt(n) away."""
        tried.append((name, num))
        if abs(math.log(rate / 10)) < 3 / math.sqrt(num):
            return answer("inconclusive", rate)
        return answer("met" if rate <= 10 else "missed", rate)

    short = run_search(FRESH, endpoint, tmp_path)
    unclear = [p for p in short.probes if p.holds is None]
    assert short.found.unclear
    assert not short.found.within(0.1)
    assert all(p.num_requests == 100 for p in unclear)

    tried.clear()
    more = resume_search(replace(FRESH, most_requests=100_000), tmp_path)
    longer = run_search(more, endpoint, tmp_path)
    assert tried[0] == (unclear[0].folder, 200)
    assert longer.found.low <= 10 < longer.found.high
    assert longer.found.within(0.1)
    names = [p.folder for p in longer.probes]
    assert names == [f"try-{k + 1}" for k in range(len(names))]


def test_an_invalid_try_ends_the_search(tmp_path: Path) -> None:
    """It is no limit: the reasons are said, and the search goes on from the tries before it."""
    (tmp_path / "search.json").write_text(as_json(replace(SEARCH, probes=SEARCH.probes[:1])))
    tried = []

    def measure(rate: float, _num: int, _name: str) -> Any:  # noqa: ANN401
        tried.append(rate)
        return answer("met" if rate <= 10 else "invalid", rate)

    for _ in range(2):
        with pytest.raises(Inconclusive, match="invalid it is") as stopped:
            run_search(resume_search(FRESH, tmp_path), measure, tmp_path)
        assert stopped.value.exit_code == Exit.INCONCLUSIVE
    assert tried == [10, 12.5, 12.5]
    assert [p.requests_per_s for p in resume_search(FRESH, tmp_path).probes] == [8, 10]


@pytest.mark.parametrize(
    ("tries", "says", "code"),
    [
        ({8: True, 8.5: False}, "holds at 8.00 requests/s and misses at 8.50", Exit.DONE),
        ({8: True, 10: None, 12.5: False}, "100 requests (--most", Exit.INCONCLUSIVE),
        ({8: True, 10: None}, "holds at 8.00 requests/s; no probed rate misses", Exit.INCONCLUSIVE),
        ({8: False}, "no probed rate holds the SLO", Exit.NEGATIVE),
        ({8: None}, "no probed rate is known to hold the SLO", Exit.INCONCLUSIVE),
        ({6: None, 8: False}, "unclear at 6.00 requests/s: no run of at most", Exit.INCONCLUSIVE),
    ],
)
def test_only_what_held_is_said_to_hold(
    tries: dict[float, bool | None], says: str, code: Exit
) -> None:
    """The limit lies between tries; a rate that told nothing is named as one, and is exit 4."""
    probes = tuple(make_probe(rate, holds=holds) for rate, holds in tries.items())
    search = replace(SEARCH, probes=probes)

    assert says in " ".join(search_lines(search))
    assert _exit(search, None) == code


def test_the_plan_is_compared_with_both_ends() -> None:
    """10 requests/s predicted: 20 % below one that missed at 12.5, 25 % above 8, which held."""
    open_ended = replace(SEARCH, probes=SEARCH.probes[:1])
    closed = replace(SEARCH, probes=(make_probe(8, holds=True), make_probe(12.5, holds=False)))

    assert "-20% to +25% off the measured limit" in list(search_lines(closed))[1]
    assert closed.error_fraction == pytest.approx(0)
    assert "off the measured" not in list(search_lines(open_ended))[1]
    assert open_ended.error_fraction is None
    assert _exit(replace(closed, resolution_fraction=0.6, predicted_requests_per_s=20), 0.15) == 3


def queued(folder: Path, slots: int = 8, service_s: float = 0.2) -> None:
    """Leave in *folder* what a run would that is served by so many slots, in order of arrival."""
    free_s, samples = [0.0] * slots, []
    for asked in read_schedule(folder / "schedule.jsonl"):
        begins_s = max(heapq.heappop(free_s), asked.due_s)
        heapq.heappush(free_s, begins_s + service_s)
        sample = make_sample(
            asked.index,
            asked.due_s,
            ttft_s=begins_s + 0.05 - asked.due_s,
            itl_s=0.015,
            num_output=asked.output_tokens,
            in_window=asked.in_window,
            asked_input_tokens=asked.input_tokens,
            input_tokens=asked.input_tokens,
        )
        samples.append(sample)
    leave(folder, samples)


def test_a_server_with_so_many_slots(
    start_server: ServerStarter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server of 8 slots and 0.2 s a request holds 40 requests/s: found, compared, resumed."""
    monkeypatch.setattr(launch, "run_with_progress_bar", lambda folder, *_: queued(folder))
    slo = SloSpec(ttft_s=0.5, tpot_s=None, percentile="p50")
    plan = plan_json(make_plan(rate=30.0, num_output=11, slo=slo), tmp_path)
    out = tmp_path / "search"
    options = ["--host", start_server(), "--warmup", "2", "--most-requests", "2000", "-o", out]
    done = loadtest("search", plan, *options, "--resolution", "0.3", "--json")
    again = loadtest("search", plan, *options, "--resolution", "0.3")

    found = json.loads(done.stdout)["probes"]
    assert done.returncode == again.returncode == Exit.DONE, done.stderr
    assert max(p["requests_per_s"] for p in found if p["holds"]) > 30
    assert 40 < min(p["requests_per_s"] for p in found if p["holds"] is False) < 65
    assert f"resumed after {len(found)} runs" in again.stderr
    assert "Goodput against load" in (out / "search.html").read_text()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--resolution", "0"], "--resolution"),
        (["--first", "-1"], "--first"),
        (["--most-requests", "3"], "--most-requests"),
    ],
)
def test_bad_options_are_refused(
    tmp_path: Path, deaf_port: int, options: list[str], says: str
) -> None:
    plan = plan_json(make_plan(), tmp_path)
    host = f"http://127.0.0.1:{deaf_port}"
    done = loadtest("search", plan, "--host", host, *options, "-o", tmp_path / "out")

    assert done.returncode == Exit.BAD_INPUT
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
