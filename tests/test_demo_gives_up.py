"""How `make demo` ends where one of its commands fails; the whole demo is a campaign."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from minicluster.contention import cpu_times

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
    run = demo.Demo(screen=demo.Screen(verbose=False), mark="none", begun=cpu_times({os.getpid()}))
    monkeypatch.setattr(demo.Demo, "disturbed_fraction", lambda _self: others)
    failed = demo.StepFailed("serving up", code, ["one line", "No engine <b> started"])

    assert demo.give_up(run, failed) == exit_code

    written = json.loads((demo.OUT / "verdict.json").read_text(encoding="utf-8"))
    assert (written["verdict"], written["exit_code"]) == (verdict, exit_code)
    busy = "other processes took 61% of the cores"
    assert (busy in written["reasons"]) == (others > 0.2)
    assert "No engine <b> started" in written["reasons"]
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
    run = demo.Demo(screen=demo.Screen(verbose=False), mark="none", begun=cpu_times({os.getpid()}))
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
def test_the_rate_follows_the_cpu(
    demo: Any,  # noqa: ANN401
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capacity: float,
) -> None:
    """A CPU that the first rates saturate is loaded as far as a quick one."""

    def utilisation(_calibration: Path, rate: float) -> float | None:
        used = rate / capacity * (1 + 0.2 * min(1.0, rate / capacity))
        return used if used < 1 else None

    monkeypatch.setattr(demo, "utilisation", utilisation)
    rate = demo.demo_rate(tmp_path / "calibration.json")
    assert utilisation(tmp_path, rate) == pytest.approx(demo.UTILISATION, rel=0.15)


@pytest.mark.parametrize(("rate", "requests"), [(3.0, 600), (10.4, 624), (20.0, 640)])
def test_the_load_is_long_enough_to_judge_and_no_longer(
    demo: Any,  # noqa: ANN401
    rate: float,
    requests: int,
) -> None:
    assert demo.num_requests(rate, demo.LOAD_S, demo.REQUESTS) == requests
