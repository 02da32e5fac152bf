"""Ends of the endpoint and of the deployment under load, on simulated engines."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import psutil
import pytest

from tests.serving.client import send
from tests.serving.command import serving
from tests.serving.deployed import healthy, outstanding, up
from tests.serving.faults.load import body_of, refused, under_way
from tests.serving.faults.processes import processes
from tests.serving.simulated.conftest import plan_for_gpus
from tests.waiting import until

pytestmark = pytest.mark.simulated

BODIES = [body_of(seed, tokens=50, max_tokens=24) for seed in range(3)]


def stopping(base_url: str) -> bool:
    try:
        urlopen(f"{base_url}/ready", timeout=60).close()  # noqa: S310  (our own endpoint)
    except HTTPError as error:
        return bool(json.load(error)["error"]["code"] == "stopping")
    return False


def test_answers_under_way_end_first(tmp_path: Path, small_model: Path) -> None:
    """At SIGTERM to the endpoint, after which Serve starts another one, and at `serving down`."""
    options = ("--engine", "simulated", "--slowdown", "10")
    with up(tmp_path, plan_for_gpus(small_model), *options) as base_url:
        state = json.loads((tmp_path / ".minicluster/serving/state.json").read_text())
        [first] = [each for each in processes(state["cluster_id"]) if each.role == "ingress"]
        with under_way(base_url, BODIES) as waiting:
            until(lambda: outstanding(base_url) == len(BODIES), "all are under way")
            os.kill(first.pid, signal.SIGTERM)
            until(lambda: stopping(base_url), "no new work")
            late = send(f"{base_url}/v1/completions", body_of(99), 60)
            assert refused(late, 503, "stopping")
        assert all(each.result().done for each in waiting), waiting
        until(lambda: not psutil.pid_exists(first.pid), "the endpoint has ended")
        until(lambda: healthy(base_url), "there is another one")
        with under_way(base_url, BODIES) as waiting:
            until(lambda: outstanding(base_url) == len(BODIES), "all are under way again")
            done = serving(tmp_path, "down")
        assert done.returncode == 0, done.stderr
        assert all(each.result().done for each in waiting), waiting
