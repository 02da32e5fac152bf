"""An endpoint that wants a key: it is shown everywhere, and written nowhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from loadtest.client.api_key import VARIABLES, authorization
from loadtest.run.run_config import RunLength
from minicluster.errors import Exit, InputError
from minicluster.workload.samples import read_samples
from tests.loadtest.command import run
from tests.loadtest.sending import judged, order, send

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import ServerStarter

OURS, OPENAI = VARIABLES
KEY = "secret-of-the-tests-0123456789"


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


@pytest.mark.parametrize("more", [["--api", "chat"], ["--processes", "2"]], ids=str)
def test_the_key_opens_and_is_kept_nowhere(
    start_server: ServerStarter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: list[str]
) -> None:
    """The list of models, the chats that teach and every request show it; no file holds it."""
    monkeypatch.setenv(OURS, KEY)
    host = start_server(ttft_s=0.01, itl_s=0.001, key=KEY)
    done = run(host, tmp_path, "--requests", "30", *more)
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
    done = run(start_server(key=KEY), tmp_path / "out")

    assert done.returncode == Exit.TARGET_FAILED
    assert "401" in done.stderr
    assert OURS in done.stderr
    assert (key or KEY) not in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("status", [401, 403])
def test_where_only_answers_want_a_key_the_variable_is_named_too(
    start_server: ServerStarter, tmp_path: Path, status: int
) -> None:
    """Models may be listed for everybody and answers kept for those with a key."""
    host = start_server(fail_every=1, status=status)
    chat = run(host, tmp_path / "out", "--api", "chat")
    completions = judged(send(order(host, RunLength(num_requests=5, warmup_s=0)), tmp_path))

    assert (chat.returncode, completions.exit) == (Exit.TARGET_FAILED, Exit.TARGET_FAILED)
    for said in (chat.stderr, completions.reasons[0]):
        assert str(status) in said
        assert OURS in said
