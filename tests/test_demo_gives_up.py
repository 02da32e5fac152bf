"""How `make demo` ends where one of its commands fails; the whole demo is a campaign."""

from __future__ import annotations

import importlib
import json
import os
import re
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from minicluster.stats.shares import LEVELS, samples_needed, share_interval

FOLDER = Path(__file__).parents[1] / "scripts"


@pytest.fixture
def demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the script as a module that writes below a folder of the test."""
    monkeypatch.syspath_prepend(str(FOLDER))
    module = importlib.import_module("demo")
    monkeypatch.setattr(module, "OUT", tmp_path)
    return module


@pytest.mark.parametrize(
    ("others", "code", "verdict", "exit_code"),
    [
        (0.61, 5, "invalid", 4),  # an engine that did not start in time
        (0.61, 3, "invalid", 4),  # no plan holds the SLO
        (0.05, 3, "infeasible", 3),
        (0.05, 5, "failed", 5),
        (0.61, 2, "failed", 2),  # bad input is bad input on any machine
    ],
)
def test_a_failed_command_is_explained(
    demo: Any,  # noqa: ANN401
    monkeypatch: pytest.MonkeyPatch,
    others: float,
    code: int,
    verdict: str,
    exit_code: int,
) -> None:
    """Verdict, reasons and page lie there, and other processes are named where they explain it."""
    run = demo.Demo(
        screen=demo.Screen(verbose=False),
        mark="none",
        phases=demo.first_phases(),
    )
    monkeypatch.setattr(demo.Demo, "disturbed_fraction", lambda _self: others)
    said = ["serving: No engine <b> started", *["stopping"] * 4]
    failed = demo.StepFailed("sizing calibrate", code, said)

    assert demo.give_up(run, failed) == exit_code

    written = json.loads((demo.OUT / "verdict.json").read_text(encoding="utf-8"))
    assert (written["verdict"], written["exit_code"]) == (verdict, exit_code)
    busy = "other processes took 61% of the cores"
    assert (busy in written["reasons"]) == (others > 0.2 and code != 2)
    assert written["reasons"][-1] == "serving: No engine <b> started"
    page = (demo.OUT / "report.html").read_text(encoding="utf-8")
    assert verdict.upper() in page
    assert "&lt;b&gt;" in page


def test_a_cpu_too_slow_for_the_slo_gets_a_plan_for_looser_limits(
    demo: Any,  # noqa: ANN401
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Limits are doubled while no plan holds, or none with room; the second load begins there."""
    monkeypatch.chdir(FOLDER.parent)
    tried: list[float] = []
    pace_s = 0.06

    def command(_self: object, *parts: object, endings: tuple[int, ...]) -> int:
        given = dict(str(part).split("=") for part in parts if "=" in str(part))
        tried.append(float(given["slo.tpot_s"]))
        assert 3 in endings or tried[-1] == 0.2
        slo = {"ttft_s": float(given["slo.ttft_s"]), "tpot_s": tried[-1]}
        predicted = {"ttft": {"p90_s": 0.1}, "tpot": {"p90_s": pace_s}}
        plan = tmp_path / "plan.json"
        plan.write_text(json.dumps({"slo": slo, "prediction": predicted}), encoding="utf-8")
        return 0 if tried[-1] > pace_s else 3

    monkeypatch.setattr(demo.Demo, "command", command)
    run = demo.Demo(
        screen=demo.Screen(verbose=False),
        mark="none",
        phases=demo.first_phases(),
    )
    looser = demo.make_plan(run, tmp_path / "calibration.json", 3.0, tmp_path / "plan.json")
    assert (looser, tried) == (2, [0.05, 0.1])
    assert "TPOT < 0.05 s" in capsys.readouterr().err
    demo.make_plan(run, tmp_path / "c.json", 3.0, tmp_path / "plan.json", looser=looser)
    assert tried == [0.05, 0.1, 0.1]
    pace_s = 0.072  # too close to the limit of 0.1
    assert demo.make_plan(run, tmp_path / "c.json", 3.0, tmp_path / "plan.json") == 4
    pace_s = 0.03
    assert demo.make_plan(run, tmp_path / "c.json", 3.0, tmp_path / "plan.json") == 1


@pytest.mark.parametrize("capacity", [0.4, 1.9, 3.97, 9.0, 60.0])
def test_a_slow_cpu_gets_a_lower_rate(
    demo: Any,  # noqa: ANN401
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capacity: float,
) -> None:
    """The scenario's rate, or one that leaves the busier pool idle for most of the time."""
    monkeypatch.chdir(FOLDER.parent)

    def utilisation(_calibration: Path, rate: float) -> float | None:
        used = rate / capacity * (1 + 0.2 * min(1.0, rate / capacity))
        return used if used < 1 else None

    monkeypatch.setattr(demo, "utilisation", utilisation)
    rate = demo.demo_rate(tmp_path / "calibration.json")
    scenario = tomllib.loads(Path(demo.SCENARIO).read_text(encoding="utf-8"))
    if rate < scenario["workload"]["requests_per_s"]:
        assert 0.7 * demo.MOST_USED < utilisation(tmp_path, rate) <= 1.02 * demo.MOST_USED
    else:
        assert utilisation(tmp_path, rate) <= demo.MOST_USED


@pytest.mark.parametrize("rate", [0.5, 3.0, 7.0, 20.0])
def test_the_first_load_can_be_decided(demo: Any, rate: float) -> None:  # noqa: ANN401
    """Requests of which two in a hundred miss decide it, though fifty weigh as one."""
    requests = demo.num_requests(rate, demo.LOAD_S, demo.REQUESTS)
    level = LEVELS[demo.PERCENTILE]
    assert requests >= samples_needed(level)
    assert share_interval(0.98, requests, 50.0).low >= level


def test_progress_says_how_many_seconds_are_left(
    demo: Any,  # noqa: ANN401
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A line a phase, numbered; and the seconds of each phase are kept."""
    screen, mark = demo.Screen(verbose=False), "none"
    run = demo.Demo(screen=screen, mark=mark, phases=demo.first_phases())
    run.phase("model", "make a model")
    run.expect("load", 1000)
    run.phase("load", "load it")
    whole = sum(phase.expected_s for phase in demo.first_phases())
    first, second = capsys.readouterr().err.splitlines()
    assert first == f"demo: 1/6 make a model (0 s, {whole:.0f} s left)"
    assert re.fullmatch(r"demo: 4/6 load it \(0 s, 10\d\d s left\)", second)
    assert list(run.seconds_by_phase()) == ["model", "load"]


def compared(*, held: bool, pace: dict[str, float]) -> dict[str, Any]:
    """Return a comparison as `verdict.json` has it, of mean TTFT and TPOT."""
    rows = [
        {
            "metric": metric,
            "statistic": "mean",
            "predicted_s": 0.05,
            "measured_s": 0.1,
            "error_fraction": -0.5,
            "error_at_pace_fraction": -0.08 if pace else None,
        }
        for metric in ("ttft", "tpot")
    ]
    tolerance = {"ttft": 0.2, "tpot": 0.15}
    return {"rows": rows, "tolerance": tolerance, "held": held, "pace": pace}


def test_a_load_is_shown_with_and_without_the_pace(demo: Any) -> None:  # noqa: ANN401
    """Raw error and error at pace stand side by side; without a pace there is one error."""
    paced = compared(held=True, pace={"prefill": 1.14, "decode": 0.97})
    lines = demo.load_lines("first load", {"outcomes": {"ok": 490}, "comparison": paced})
    heads = "first load, 490 requests predicted measured error at pace"
    assert lines[0].split() == heads.split()
    assert lines[1].split() == ["TTFT", "mean", "50.0", "ms", "100.0", "ms", "-50%", "-8%"]
    assert lines[-2] == "  engine steps against the plan's: prefill 14% slower, decode 3% faster"
    assert lines[-1] == (
        "  prediction of the means at that pace held: TTFT -8% (of ±20%), TPOT -8% (of ±15%)"
    )
    assert max(map(len, lines)) <= 84
    plain = {"outcomes": {"ok": 490}, "comparison": compared(held=False, pace={})}
    lines = demo.load_lines("first load", plain)
    assert "pace" not in "".join(lines)
    assert "did not hold: TTFT -50% (of ±20%), TPOT -50%" in lines[-1]


@pytest.mark.parametrize(
    ("cores", "memory_bytes", "says"),
    [
        (1, 8e9, "1 core may be used; expected 2 or more"),
        (2, 2.2e9, "2.2 GB of memory are available; expected 4.5 GB or more"),
        (2, 8e9, None),
    ],
)
def test_a_machine_that_is_too_small_is_refused(
    demo: Any,  # noqa: ANN401
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    cores: int,
    memory_bytes: float,
    says: str | None,
) -> None:
    """One sentence before anything starts, with what is needed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo.os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr(demo, "available_bytes", lambda: memory_bytes)
    monkeypatch.setattr(demo, "OUT", tmp_path / "demo")
    monkeypatch.setattr(demo, "AGAIN", tmp_path / "demo" / "again")
    found = demo.refused()
    assert found is None if says is None else says in found
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(demo, "AGAIN", tmp_path / "file" / "again")
    if says is None:
        assert "expected a folder that can be written" in demo.refused()


def test_a_log_that_cannot_be_written_stops_no_command(
    demo: Any,  # noqa: ANN401
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """On a full disk `serving down` still has to run."""
    monkeypatch.setattr(demo, "LOG", tmp_path / "no-folder" / "log.txt")
    with demo.opened_log("$ serving down") as log:
        assert log.name == os.devnull
    monkeypatch.setattr(demo, "LOG", tmp_path / "log.txt")
    with demo.opened_log("$ serving down") as log:
        log.write("stopped\n")
    assert (tmp_path / "log.txt").read_text() == "$ serving down\nstopped\n"
