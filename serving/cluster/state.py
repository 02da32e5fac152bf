"""The state file: the deployment that was started from this directory, for later commands."""

from __future__ import annotations

import shutil
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from pydantic import TypeAdapter, ValidationError

from minicluster.errors import InputError
from minicluster.files import locked, make_folder, write_together

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

Record = TypeVar("Record")

HOME = Path(".minicluster/serving")
LOCK = HOME.parent / "serving.lock"
"""Lock of the commands that change the deployment of this directory, one at a time."""

STATE = HOME / "state.json"
PLAN = HOME / "plan.json"
"""Copy of the plan, or of the deployment to measure."""

DEPLOYMENT = HOME / "deployment.json"
"""The deployment that runs: the plan's, except for the state's `changes`."""

TOKEN = HOME / "token"
"""Token of the Ray cluster, if `serving up` started it; only its owner may read the file."""

API_KEYS = HOME / "api-keys"
"""The API keys of `MINICLUSTER_API_KEYS`; only their owner may read the file."""

LOGS = HOME / "logs"
"""Logs of the last deployment, after it has been stopped."""

UNFINISHED = "has not come to its end: it is still at work, or was killed"
"""What is said of a command whose record names no address of Ray yet."""

RAY = "ray"
"""Folder of Ray's files in a private one, because Ray lets every user write into its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """
    One deployment.

    Attributes:
        cluster_id: value of `MARK` in the cluster's processes; empty for a foreign cluster, which
            `serving up` did not start.
        address: address of the Ray cluster.
        tls_cert: file of the endpoint's certificate; empty: plain HTTP.
        plan_hash: SHA-256 of the plan, 16 hex digits.
        session: Ray's directory, logs included; empty for a foreign cluster.
        instance: Ray's session name of a foreign cluster, new at each start of its head.
        owner: mark of a deployment on a foreign cluster, whose application there carries it.
        changes: differences from the plan that `scale` was asked for.
        deadlines_s: limits of prefill and of the KV hand-off; `None`: the plan's.
        generation: as in `serving.deployment.engine_args`.
        planned: whether there is a plan, not only a deployment to measure.
        true_steps: whether the engines are simulated with step times that are not the plan's.
        gpus: this machine's GPU in place of each of the plan's; none: they are the plan's.
        ready: whether the probes of `serving up` succeeded.
    """

    cluster_id: str
    address: str
    base_url: str
    target: str
    plan_hash: str
    session: str
    started: str
    instance: str = ""
    owner: str = ""
    tls_cert: str = ""
    ready: bool = False
    changes: tuple[str, ...] = ()
    deadlines_s: tuple[float | None, float | None] = (None, None)
    token_limit: int | None = None
    nixl_port: int = 0
    planned: bool = True
    slowdown: float = 1.0
    true_steps: bool = False
    gpus: tuple[int, ...] = ()
    generation: int = 1
    lora_modules: dict[str, str] = field(default_factory=dict)

    @property
    def logs(self) -> Path:
        """Directory of the running cluster's logs."""
        return Path(self.session) / "session_latest" / "logs"


@contextmanager
def changing() -> Iterator[None]:
    """
    Let no other command change the deployment of this directory meanwhile.

    Raises:
        InputError: another one does.
    """
    make_folder(LOCK.parent, "serving")
    try:
        with locked(LOCK, str(HOME), "serving up or scale"):
            yield
    finally:
        with suppress(OSError):  # what has refused its arguments leaves no empty directory
            LOCK.parent.rmdir()


def read_state() -> State | None:
    """Return the deployment of this directory, if there is one."""
    return read_record(STATE, State, "`serving up`", f"remove {STATE} and `ray stop`")


def write_state(state: State, copies: Mapping[Path, str] | None = None) -> None:
    """Write the state, and *copies* beside it; an interrupt or a full disk leaves the old files."""
    make_folder(HOME, "serving")
    write_together({**(copies or {}), STATE: _as_json(state)})


def read_record(file: Path, kind: type[Record], writer: str, way_out: str) -> Record | None:
    """Return the dataclass *kind* that *writer* wrote to *file*, if there is one."""
    try:
        return TypeAdapter(kind).validate_json(file.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        problem = f"{error.error_count()} error(s), {error.errors()[0]['msg']}"
        raise InputError(str(file), problem, f"what {writer} wrote", way_out) from None


def write_record(file: Path, record: object) -> None:
    """Write a dataclass as JSON; an interrupt leaves the old file."""
    make_folder(file.parent, "serving")
    write_together({file: _as_json(record)})


def _as_json(record: object) -> str:
    return TypeAdapter(type(record)).dump_json(record, indent=2).decode() + "\n"


def remove_state(state: State) -> None:
    """
    Keep the logs of a deployment that has been stopped, and remove all its other files.

    Raises:
        InputError: the logs cannot be copied. They stay where Ray wrote them, and so do former
            ones; all else is removed, because the deployment does not run.
    """
    failure = ""
    if state.session and state.cluster_id:
        failure = _keep_logs(state.logs) if state.logs.is_dir() else ""
        if not failure:
            remove_session(Path(state.session))
    for file in (TOKEN, API_KEYS, PLAN, DEPLOYMENT, STATE):
        file.unlink(missing_ok=True)
    if failure:
        expectation = "room for the logs of the deployment that was stopped"
        raise InputError(str(LOGS), failure, expectation, f"they stay in {state.logs}")


def _keep_logs(logs: Path) -> str:
    copy = LOGS.with_name("logs.copy")
    try:
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(logs, copy, ignore_dangling_symlinks=True)
        shutil.rmtree(LOGS, ignore_errors=True)
        copy.rename(LOGS)
    except OSError as error:
        shutil.rmtree(copy, ignore_errors=True)
        first = error.args[0][0][-1] if isinstance(error, shutil.Error) else error
        return str(first).partition(": '")[0]  # without its files, both of which are named below
    return ""


def remove_session(session: Path) -> None:
    """Remove Ray's files, and the private folder in which they are."""
    shutil.rmtree(session.parent if session.name == RAY else session, ignore_errors=True)
