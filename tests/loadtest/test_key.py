"""An endpoint that wants a key: it is shown everywhere, and written nowhere."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from loadtest.key import VARIABLES, authorization
from loadtest.samples import read_samples
from sizing.errors import Exit, InputError

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import ServerStarter

OURS, OPENAI = VARIABLES
KEY = "secret-of-the-tests-0123456789"
LOAD = ["--rate", "60", "--requests", "30", "--warmup", "0.1", "--seed", "1"]
LENGTHS = ["--input-tokens", "16-64", "--output-tokens", "3"]


def load(host: str, folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """Run `loadtest run` for an SLO that nothing misses."""
    slo = ["--slo", "ttft=30,tpot=5,percentile=p50"]
    command = [sys.executable, "-c", "from loadtest.cli import main; main()", "run"]
    given = ["--host", host, *LOAD, *LENGTHS, *slo, "-o", str(folder), *more]
    return subprocess.run(
        [*command, *given], capture_output=True, text=True, timeout=120, check=False
    )


@pytest.fixture(autouse=True)
def without_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the keys of whoever runs the tests."""
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)


@pytest.mark.parametrize(
    ("environment", "shown"),
    [
        ({}, None),
        ({OPENAI: KEY}, KEY),
        ({OPENAI: "another", OURS: f" {KEY}\n"}, KEY),
        ({OPENAI: KEY, OURS: ""}, None),
    ],
)
def test_the_key_is_that_of_the_first_variable(
    environment: dict[str, str], shown: str | None
) -> None:
    """Ours comes first; set and empty, it keeps OpenAI's key from those it is not for."""
    assert authorization(environment) == ({"authorization": f"Bearer {shown}"} if shown else {})


@pytest.mark.parametrize("key", [f"{KEY}\nx: y", f"{KEY}\x00", f"{KEY}ä"])
def test_a_key_that_no_header_holds_is_refused_unseen(key: str) -> None:
    """The message names the variable, and does not show the key."""
    with pytest.raises(InputError, match=OURS) as refused:
        authorization({OURS: key})
    assert KEY not in str(refused.value)


@pytest.mark.parametrize("more", [[], ["--api", "chat"], ["--processes", "2"]], ids=str)
def test_the_key_opens_and_is_kept_nowhere(
    start_server: ServerStarter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: list[str]
) -> None:
    """The list of models, the chats that teach and every request show it; no file holds it."""
    monkeypatch.setenv(OURS, KEY)
    done = load(start_server(ttft_s=0.01, itl_s=0.001, key=KEY), tmp_path, *more)
    samples = read_samples(tmp_path / "samples.jsonl")

    assert len(samples) >= 30, done.stderr
    assert all(s.ok for s in samples if s.in_window), done.stdout
    assert KEY not in done.stdout + done.stderr
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"run.json", "samples.jsonl", "client.json"} <= {path.name for path in files}
    assert not [path for path in files if KEY.encode() in path.read_bytes()]


@pytest.mark.parametrize("key", [None, "another-secret-0123456789"])
def test_without_the_key_the_variable_is_named(
    start_server: ServerStarter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str | None
) -> None:
    """No key or a wrong one: one line with the way in, and nothing written."""
    if key:
        monkeypatch.setenv(OURS, key)
    done = load(start_server(key=KEY), tmp_path / "out")

    assert done.returncode == Exit.TARGET_FAILED
    assert "401" in done.stderr
    assert OURS in done.stderr
    assert (key or KEY) not in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("api", ["completions", "chat"])
@pytest.mark.parametrize("status", [401, 403])
def test_where_only_answers_want_a_key_the_variable_is_named_too(
    start_server: ServerStarter, tmp_path: Path, status: int, api: str
) -> None:
    """Models may be listed for everybody and answers kept for those with a key."""
    host = start_server(fail_every=1, status=status)
    done = load(host, tmp_path, "--api", api)
    said = (done.stdout + done.stderr).replace("\n", " ")

    assert done.returncode == Exit.TARGET_FAILED
    assert str(status) in said
    assert OURS in said
