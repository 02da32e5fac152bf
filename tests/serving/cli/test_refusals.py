"""What the commands of `serving` refuse before anything is started or written."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import grpc
import pytest

from minicluster.plan import Plan, to_json
from serving.cluster.connection import FIRST_CALL
from serving.cluster.ports import free_ports
from serving.cluster.token import CERTIFICATES, TOKEN, TOKEN_PATH, USE_TLS
from tests.serving.command import serving_here

TWO_REASONS = {"pools.1.placement.0.gpus": [98], "pools.1.kv_bytes": 1.0}
RULE = {"deployable.rule_broken": "pp = 2"}
ANYWHERE = "0.0.0.0"  # noqa: S104  (refused without keys)
CLUSTER = "it has to be one of the two"


def _changed(plan: Plan, change: dict[str, object] | None) -> str:
    """Return the text of a plan with other values at some places; `None`: no plan at all."""
    data: Any = json.loads(to_json(plan))
    for place, value in (change or {}).items():
        *path, last = place.split(".")
        at = data
        for key in path:
            at = at[int(key)] if key.isdigit() else at[key]
        at[last] = value
    return "plan?" if change is None else json.dumps(data)


@pytest.mark.parametrize(
    ("words", "change", "code", "says"),
    [
        ("up plan.json", {"schema_version": 99}, 2, "schema_version is 99"),
        ("up plan.json", {"pools": []}, 2, "one prefill and one decode pool"),
        ("up plan.json", {"surprise": 1}, 2, "no such field"),
        ("up plan.json", None, 2, "plan.json"),
        (
            f"up plan.json --host {ANYWHERE}",
            {},
            2,
            f"--host is '{ANYWHERE}'; it has to be API keys",
        ),
        ("up plan.json --host 192.0.2.1 --open --port 0", {}, 2, "an address of this machine"),
        ("up plan.json --tls-cert no.pem --tls-key no.pem", {}, 2, "a file that can be read"),
        ("up plan.json --tls-cert plan.json", {}, 2, "both, --tls-key too"),
        ("up plan.json", TWO_REASONS, 3, "cores [98]"),
        ("up plan.json", TWO_REASONS, 3, "one sequence of 2048 tokens"),
        ("up plan.json", RULE, 3, "pp = 2"),
        ("up plan.json --engine sglang", {}, 2, "it has to be vllm or simulated"),
        ("up plan.json --slowdown 2", {}, 2, "--engine simulated"),
        ("up plan.json --engine simulated --slowdown 0.5", {}, 2, "at least 1"),
        ("up plan.json --engine simulated --slowdown nan", {}, 2, "at least 1"),
        ("up plan.json --step-times steps.json", {}, 2, "--engine simulated"),
        ("up plan.json --engine simulated --step-times plan.json", {}, 2, "plan.json"),
        (
            *("up plan.json --engine simulated --slowdown 2 --step-times plan.json", {}),
            *(2, "no --slowdown besides"),
        ),
        ("up plan.json --lora-modules red", {}, 2, "'red'; it has to be NAME=PATH, no name twice"),
        ("up plan.json --engine simulated --lora-modules red=", {}, 2, "NAME or NAME=PATH"),
        ("up plan.json --engine simulated --lora-modules a --lora-modules a", {}, 2, "twice"),
        ("up plan.json --engine simulated --lora-modules red", {}, 3, "the plan has no slots"),
        ("manifest plan.json --format helm", {}, 2, "--format is 'helm'; it has to be one of ray-"),
        ("manifest plan.json --format kuberay", RULE, 3, "pp = 2"),
        ("cluster up", {}, 2, CLUSTER),
        ("cluster up plan.json --nodes 2", {}, 2, CLUSTER),
        ("cluster up --nodes 0", {}, 2, "--nodes"),
        ("cluster up missing.json", {}, 2, "missing.json"),
        ("cluster status", {}, 3, "no cluster was started from this directory"),
        ("status", {}, 3, "nothing is deployed from this directory"),
        ("logs", {}, 3, "nothing was deployed from this directory"),
    ],
)
def test_bad_input(
    tmp_path: Path, plan: Plan, words: str, change: dict[str, object] | None, code: int, says: str
) -> None:
    """The exit code tells bad usage from a plan that cannot be; the line tells what is wrong."""
    (tmp_path / "plan.json").write_text(_changed(plan, change))
    done = serving_here(tmp_path, *words.split())
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert says in done.stderr
    assert done.stderr.count("\n") == 1 or code == 3
    assert [file.name for file in tmp_path.iterdir()] == ["plan.json"]


def test_a_full_disk_is_no_bug(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it is met, it is one line with the file's name, and exit code 2."""
    full = OSError(errno.ENOSPC, "No space left on device", "/there/file")
    monkeypatch.setattr("serving.operations.status.read_state", Mock(side_effect=full))
    done = serving_here(tmp_path, "status")
    said = (
        "serving: /there/file cannot be written: No space left on device;"
        " it has to be a disk that has room\n"
    )
    assert (done.returncode, done.stderr) == (2, said)


@contextmanager
def refusing() -> Iterator[str]:
    """Yield the address of a head that refuses every token, and does not answer without one."""

    def refuse(_request: bytes, context: grpc.ServicerContext) -> bytes:
        refused, silent = grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNAVAILABLE
        sent = dict(context.invocation_metadata())
        context.abort(refused if "authorization" in sent else silent, "no")
        return b""

    _, service, method = FIRST_CALL.split("/")
    handlers = {method: grpc.unary_unary_rpc_method_handler(refuse)}
    head = grpc.server(ThreadPoolExecutor(max_workers=1))
    head.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, handlers)])
    port = head.add_insecure_port("127.0.0.1:0")
    head.start()
    yield f"127.0.0.1:{port}"
    head.stop(None)


WRONG = {TOKEN: "0" * 64}


@pytest.mark.parametrize(
    ("variables", "code", "says"),
    [
        ({}, 2, f"{TOKEN_PATH} is missing; it has to be a file with the token"),
        ({TOKEN_PATH: "/nowhere"}, 2, f"{TOKEN_PATH} is '/nowhere'"),
        (WRONG, 2, "which refuses this one"),
        (WRONG | {USE_TLS: "1"}, 2, f"{CERTIFICATES[0]} is missing"),
        (None, 5, "no process listens there"),
    ],
)
def test_a_foreign_cluster(
    tmp_path: Path, plan: Plan, variables: dict[str, str] | None, code: int, says: str
) -> None:
    """No token, an unreadable one, a wrong one, no certificate, no cluster: a line, no wait."""
    (tmp_path / "plan.json").write_text(to_json(plan))
    ours = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    env = ours | {"HOME": str(tmp_path)} | (WRONG if variables is None else variables)
    with refusing() as head:
        address = f"127.0.0.1:{free_ports(1)[0]}" if variables is None else head
        done = serving_here(tmp_path, "up", "plan.json", "--address", address, env=env)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (code, "", 1), done.stderr
    assert says in done.stderr
