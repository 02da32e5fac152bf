"""What is deployed from this directory, written down so that other commands find it."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from minicluster.errors import InputError
from minicluster.files import write_atomically

HOME = Path(".minicluster/serving")
STATE = HOME / "state.json"
TOKEN = HOME / "token"
"""Of the Ray cluster, if `serving up` started it; only its owner may read the file."""

LOGS = HOME / "logs"
"""Logs of the last deployment, once it is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """
    One deployment.

    Attributes:
        cluster_id: mark of our processes; empty when the cluster is somebody else's.
        address: of the Ray cluster.
        base_url: of the endpoint.
        plan: copy of the plan, next to the state.
        plan_hash: SHA-256 of the plan, 16 hex digits.
        deployment: copy of what was deployed: the plan's, but for *changes*.
        session: Ray's directory, logs included; empty when the cluster is somebody else's.
        instance: Ray's name of somebody else's cluster, another one once its head started again.
        changes: what was asked to be otherwise than planned, by `--substitute` or `scale`.
        deadlines_s: of prefill and of the KV hand-off, where they are not the plan's.
        token_limit: most tokens of one answer, if there is a limit.
        nixl_port: first of the engines' side-channel ports.
        planned: a plan stands behind it, not a deployment that is up to be measured.
        ready: `serving up` saw the whole path work.
    """

    cluster_id: str
    address: str
    base_url: str
    target: str
    plan: str
    plan_hash: str
    session: str
    started: str
    deployment: str
    instance: str = ""
    ready: bool = False
    changes: tuple[str, ...] = ()
    deadlines_s: tuple[float | None, float | None] = (None, None)
    token_limit: int | None = None
    nixl_port: int = 0
    planned: bool = True

    @property
    def logs(self) -> Path:
        """Where the running cluster logs."""
        return Path(self.session) / "session_latest" / "logs"


def read_state() -> State | None:
    """Return what is deployed from this directory, if anything."""
    try:
        said = json.loads(STATE.read_text(encoding="utf-8"))
        lists = {name: tuple(said[name]) for name in ("changes", "deadlines_s") if name in said}
        return State(**{**said, **lists})
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, AttributeError) as error:
        raise InputError(
            str(STATE), str(error), "what `serving up` wrote", f"remove {STATE} and `ray stop`"
        ) from None


def write_state(state: State) -> None:
    """Write the state, whole or not at all."""
    HOME.mkdir(parents=True, exist_ok=True)
    write_atomically(STATE, json.dumps(asdict(state), indent=2) + "\n")


def forget(state: State) -> None:
    """Keep the logs of a deployment that is gone, and remove all else of it."""
    if state.session and state.cluster_id:
        if state.logs.is_dir():
            shutil.rmtree(LOGS, ignore_errors=True)
            # A log that cannot be kept, on a full disk or of a directory that is gone, must not
            # keep a state of what runs no more.
            with suppress(OSError):
                shutil.copytree(state.logs, LOGS, ignore_dangling_symlinks=True)
        shutil.rmtree(state.session, ignore_errors=True)
    TOKEN.unlink(missing_ok=True)
    Path(state.plan).unlink(missing_ok=True)
    Path(state.deployment).unlink(missing_ok=True)
    STATE.unlink(missing_ok=True)
