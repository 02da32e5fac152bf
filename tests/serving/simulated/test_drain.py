"""Ends of the endpoint and of the deployment under load, on simulated engines."""

from __future__ import annotations

import json
import os
import signal
from urllib.error import HTTPError
from urllib.request import urlopen

import psutil
import pytest

from tests.serving.client import send
from tests.serving.command import serving
from tests.serving.deployed import Split, healthy
from tests.serving.faults.load import body_of, refused, under_way
from tests.waiting import until

pytestmark = pytest.mark.simulated

BODIES = [body_of(seed, tokens=50, max_tokens=150) for seed in range(3)]
"""Of 13 s each."""


def stopping(base_url: str) -> bool:
    try:
        urlopen(f"{base_url}/ready", timeout=60).close()  # noqa: S310  (our own endpoint)
    except HTTPError as error:
        return bool(json.load(error)["error"]["code"] == "stopping")
    return False


def test_answers_under_way_end_first(ending: Split) -> None:
    """At SIGTERM to the endpoint, after which Serve starts another one, and at `serving down`."""
    base_url = ending.base_url
    [first] = ending.find("ingress")
    # One: an idle cluster admits it, whatever admission learned in other tests (eq. G5).
    with under_way(base_url, BODIES[:1]) as waiting:
        ending.wait_until_inside(1)
        os.kill(first.pid, signal.SIGTERM)
        until(lambda: stopping(base_url), "no new work")
        late = send(f"{base_url}/v1/completions", body_of(99), 60)
        assert refused(late, 503, "stopping")
    assert all(each.result().done for each in waiting), waiting
    until(lambda: not psutil.pid_exists(first.pid), "the endpoint has ended")
    until(lambda: healthy(base_url), "there is another one")
    with under_way(base_url, BODIES) as waiting:
        ending.wait_until_inside(len(BODIES))
        done = serving(ending.place, "down")
    assert (done.returncode, done.stdout, done.stderr) == (0, "stopped\n", "stopping\n")
    assert all(each.result().done for each in waiting), waiting
