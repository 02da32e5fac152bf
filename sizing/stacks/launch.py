"""Scripts and manifests as the engines that they start, each with its command line."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from minicluster.errors import InputError
from minicluster.plan.vllm_args import KV_ROLES
from sizing.stacks.documents import Table, documents
from sizing.stacks.flags import UNKNOWN, effects, undecided, unknown
from sizing.stacks.shell import Command, Value, commands

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

DYNAMO, API_SERVER, IMAGE = "dynamo.vllm", "vllm.entrypoints.openai.api_server", "vllm-openai"

ENGINE = re.compile(rf"vllm[\s',\"]+serve\b|{re.escape(API_SERVER)}|dynamo\.vllm|{IMAGE}")
"""The start of an engine in a text."""

ENVIRONMENT = re.compile(r"(VLLM|LMCACHE|DYN|NIXL)_")
"""Names of variables of the environment that an engine may depend on."""

CONTAINER = (("docker", "run"), ("podman", "run"))

SHELLS = {"sh", "bash", "dash", "zsh"}

PODS = ("Deployment", "LeaderWorkerSet", "Pod", "ReplicaSet", "StatefulSet")


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """
    An engine that a file starts.

    Attributes:
        words: the arguments of its server.
        place: file and line, or the name of what starts it.
        dynamo: whether its flags are those of `dynamo.vllm`.
        role: that a manifest gives it; `None`: its arguments say.
        gpus: of all pods of a replica, as a manifest asks for them.
    """

    words: tuple[str, ...]
    place: str
    replicas: int = 1
    dynamo: bool = False
    role: str | None = None
    gpus: int | None = None


def script(
    text: str, place: str, notes: list[str], variables: Mapping[str, Value] | None = None
) -> list[Launch]:
    """
    Return the engines that a shell script starts.

    Args:
        notes: gets a sentence on the commands that start none.
        variables: that the script finds set.

    Raises:
        InputError: an engine of which the file does not say how often it runs.
    """
    found: list[Launch] = []
    others: dict[str, None] = {}
    comments: dict[int, str] = {}
    for command in commands(text, place, variables or {}) if ENGINE.search(text) else ():
        started = of_command(command, notes)
        if not started:
            others[command.words[0].rpartition("/")[2]] = None
            continue
        times, line = command.said
        if comments.get(line) == command.place and times > 1:
            expected = "no comment that says so above a loop, whose rounds are counted"
            raise InputError(command.place, f"{times} replicas", expected)
        times = 1 if line in comments else times
        comments.setdefault(line, command.place)
        found += [replace(each, replicas=each.replicas * times) for each in started]
    if found and others:
        names = ", ".join(others).replace(UNKNOWN, "")
        notes.append(f"{place}: commands that start no engine of vLLM are not read: {names}")
    return found


def of_command(command: Command, notes: list[str]) -> list[Launch]:
    """
    Return the engines that a command starts: directly, through a shell or in a container.

    Raises:
        InputError: an engine that something starts of which it is not known how often.
    """
    words, place, known = command.words, command.place, effects()["commands"]
    names = [word.rpartition("/")[2].replace(UNKNOWN, "") for word in words]
    engine, shell = _engine(words), _shell(words)
    if tuple(names[:2]) in CONTAINER:
        inner = _in_container(command)
        found = of_command(replace(command, words=inner), notes) if inner else []
        before: Sequence[str] = ()
    elif names[0] in known["speaking"]:
        return []
    elif shell is not None and (engine is None or shell[0] < engine[0]):
        found, before = script(shell[1], place, notes, command.variables), names[: shell[0]]
    elif engine is not None:
        begin, end, dynamo = engine
        found, before = [Launch(words=words[end:], place=place, dynamo=dynamo)], names[:begin]
        unread = ", ".join(filter(ENVIRONMENT.match, command.variables))
        notes += [f"{place}: not read, and not in the prediction: {unread}"] if unread else []
    elif ENGINE.search(" ".join((*words, command.text))):
        shown = f"{names[0]} with an engine in its arguments or its text"
        raise InputError(place, shown, "a command that starts vllm serve itself")
    else:
        return []
    if found and not _runs_once(before):
        shown = f"{' '.join(before[:3])} before an engine"
        raise InputError(place, shown, "vllm serve or python -m, started once")
    if found and command.sometimes:
        expected = "engines of which the file says how many run"
        way_out = "write each command that runs on a line of its own"
        raise InputError(place, f"an engine in {command.sometimes}", expected, way_out)
    return found


def _engine(words: Sequence[str]) -> tuple[int, int, bool] | None:
    """Return where a command of an engine begins, where its arguments do, and if it is Dynamo's."""
    for at, word in enumerate(words):
        if word.rpartition("/")[2] == "vllm" and [*words[at + 1 : at + 2]] == ["serve"]:
            return at, at + 2, False
        if word in {API_SERVER, DYNAMO}:
            begin = at
            while begin and re.fullmatch(r"-[mu]|.*python[\d.]*", words[begin - 1]):
                begin -= 1
            return begin, at + 1, word == DYNAMO
    return None


def _shell(words: Sequence[str]) -> tuple[int, str] | None:
    """Return where a shell or `eval` begins that runs a text, and the text."""
    if words[0] == "eval":
        return 0, " ".join(words[1:])
    for at, word in enumerate(words):
        if word.rpartition("/")[2] in SHELLS:
            texts = [b for a, b in pairwise(words[at:]) if re.fullmatch(r"-\w*c", a)]
            return (at, texts[0]) if texts else None
    return None


def _runs_once(before: Sequence[str]) -> bool:
    """Say whether the words before an engine run it once; an option may have one value."""
    once = effects()["commands"]["once"]
    return tuple(before[:2]) in {("docker", "exec"), ("podman", "exec")} or all(
        word in once or re.match(r"-|\w+=|\d", word) or last.startswith("-")
        for last, word in pairwise(["", *before])
    )


def _in_container(command: Command) -> tuple[str, ...]:
    """Return what `docker run` runs in an image of vLLM, whose entry point may be an engine."""
    words, place = command.words, command.place
    at = next((n for n, word in enumerate(words) if IMAGE in word or (re.match(r"\S+/vllm\b", word)
               and not words[n - 1].startswith("-"))), None)  # fmt: skip
    entry = [b for a, b in pairwise(words) if a == "--entrypoint"]
    if at is None or any(word.startswith("--entrypoint=") for word in words):
        if ENGINE.search(" ".join(words)):
            expected = "docker run OPTIONS vllm/vllm-openai:TAG ARGUMENTS"
            raise InputError(place, "a container", expected)
        return ()
    inner = (*entry, *words[at + 1 :])
    starts = entry or _engine(inner) or _shell(["", *inner])
    return inner if starts or IMAGE not in words[at] else ("vllm", "serve", *inner)


def manifest(text: str, place: str, notes: list[str]) -> list[Launch]:
    """
    Return the engines of a YAML file's documents.

    Raises:
        InputError: no YAML, or a document of a kind that is not read and may start engines.
    """
    found: list[Launch] = []
    for each in documents(text, place):
        listed = isinstance(each, Table) and each.get("kind") == "List"
        for document in each.get("items") or () if listed else [each]:
            found += _document(document, place, notes)
    return found


def _document(document: object, place: str, notes: list[str]) -> list[Launch]:
    if not isinstance(document, Table):
        raise InputError(place, "a document", "documents that are tables")
    kind, where, known = f"{document.get('kind') or ''}", f"{place}:{document.line}", effects()
    if kind == "DynamoGraphDeployment":
        return list(_dynamo(document, where, notes))
    if kind in PODS:
        return _pods(document, kind, where, notes)
    if kind in known["documents"]["harmless"]:
        notes.append(f"{where}: a {kind} starts no engine: not read")
        return []
    without = known["documents"]["without_kind"]
    named = kind or next((name for key, name in without.items() if key in document), None)
    expected = f"a DynamoGraphDeployment, or one of {', '.join(PODS)} with vllm serve"
    raise InputError(f"{where}: kind", named, expected, "a script of its commands is read, too")


def _dynamo(document: Table, place: str, notes: list[str]) -> Iterator[Launch]:
    """Yield the engines of a graph in the words of either version of Dynamo's API."""
    version = f"{document.get('apiVersion') or 'nvidia.com/v1alpha1'}"
    if version.rpartition("/")[2] not in {"v1alpha1", "v1beta1"}:
        raise InputError(f"{place}: apiVersion", version, "nvidia.com/v1alpha1 or v1beta1")
    spec, workers = _table(document, "spec", place, "spec.services with a worker"), 0
    label = "components" if "components" in spec else "services"
    rows = spec.get(label)
    named = rows.items() if isinstance(rows, Mapping) else [
        (each.get("name"), each) for each in _list(spec, label, place) if isinstance(each, Mapping)
    ]  # fmt: skip
    for name, service in named:
        where = f"{place}: spec.{label}.{name}"
        if not isinstance(service, Mapping):
            raise InputError(where, service, "a table")
        kind = service.get("componentType") or service.get("type")
        if kind == "planner":
            notes.append(f"{where}: a planner changes replicas; those of the file are read")
        if kind in ("worker", *KV_ROLES):
            workers += 1
            role = service.get("subComponentType") or (kind if kind in KV_ROLES else None)
            if role not in (None, *KV_ROLES):
                shown = role if isinstance(role, str) else "no text"
                raise InputError(f"{where}: subComponentType", shown, "prefill or decode")
            yield replace(_worker(service, where, spec, notes), role=role)
    if not workers:
        raise InputError(place, "no worker", f"spec.{label} with a worker")


def _worker(
    service: Mapping[str, Any], place: str, spec: Mapping[str, Any], notes: list[str]
) -> Launch:
    if "podTemplate" in service:
        pod = _table(_table(service, "podTemplate", place), "spec", f"{place}: podTemplate")
        listed = [each for each in _list(pod, "containers", place) if each.get("name") == "main"]
        main = listed[0] if listed else {}
    else:
        pod = _table(service, "extraPodSpec", place)
        main = _table(pod, "mainContainer", f"{place}: extraPodSpec")
    outer = [*_list(spec, "envs", place), *_list(service, "envs", place)]
    started = _started(main, place, notes, outer)
    if len(started) != 1 or not started[0].dynamo:
        shown = " ".join(map(str, (*_list(main, "command", place), *_list(main, "args", place))))
        raise InputError(
            place, shown[:60] or None, "a worker of dynamo.vllm: python3 -m dynamo.vllm"
        )
    unread = ", ".join(sorted(map(str, set(service) - {*effects()["keys"]["dynamo_worker"]})))
    notes += [f"{place}: without effect on the plan: {unread}"] if unread else []
    nodes = positive(_table(service, "multinode", place).get("nodeCount", 1), f"{place}: nodeCount")
    gpus = _gpus(service, place) or _gpus(main, place)
    replicas = positive(service.get("replicas", 1), f"{place}: replicas")
    return replace(started[0], replicas=replicas, gpus=gpus and gpus * nodes)


def _pods(document: Table, kind: str, place: str, notes: list[str]) -> list[Launch]:
    """Return the engines of pods: of a group of them, those of the first."""
    spec, where = _table(document, "spec", place), f"{place}: {kind}"
    group = _table(spec, "leaderWorkerTemplate", where)
    one = "leaderTemplate" if "leaderTemplate" in group else "workerTemplate"
    pod = spec if kind == "Pod" else _table(
        _table(group, one, where) if group else _table(spec, "template", where), "spec", where
    )  # fmt: skip
    size = positive(group.get("size", 1), f"{where}: size")
    replicas = 1 if kind == "Pod" else positive(spec.get("replicas", 1), f"{where}: replicas")
    found = []
    for main in _list(pod, "containers", where):
        gpus = _gpus(main, where)
        found += [replace(each, replicas=each.replicas * replicas, gpus=gpus and gpus * size)
                  for each in _started(main, where, notes)]  # fmt: skip
    notes += [] if found else [f"{where} starts no engine: not read"]
    return found


def _started(
    container: Mapping[str, Any], place: str, notes: list[str], outer: Sequence[Any] = ()
) -> list[Launch]:
    """Return the engines of a container: of its command, or of the image's own."""
    if not isinstance(container, Mapping):
        raise InputError(f"{place}: containers", "a container", "tables")
    variables: dict[str, Value] = {}
    for row in [*outer, *_list(container, "env", place)]:
        name, value = row.get("name"), row.get("value")
        variables[f"{name}"] = unknown(f"${name}") if value is None else f"{value}"
    given = [*_list(container, "command", place), *_list(container, "args", place)]
    words = [
        re.sub(r"\$\((\w+)\)", lambda m: str(variables.get(m[1], unknown(m[0]))), f"{word}")
        for word in given
    ]
    if not container.get("command") and IMAGE in f"{container.get('image')}":
        words = ["vllm", "serve", *words]
    command = Command(words=tuple(words), place=place, variables=variables)
    return of_command(command, notes) if words else []


def _gpus(holder: Mapping[str, Any], place: str) -> int | None:
    """Return the GPUs that a pod asks for; `None`: it does not say."""
    resources = _table(holder, "resources", place)
    for kind in ("limits", "requests"):
        table = _table(resources, kind, f"{place}: resources")
        for key, count in table.items():
            if key in {"gpu", "nvidia.com/gpu", "amd.com/gpu"}:
                return positive(count, f"{place}: resources.{kind}.{key}")
            if re.search(r"/(tpu|gaudi|neuron)", f"{key}"):
                raise InputError(f"{place}: resources.{kind}", f"{key}", "GPUs")
    return None


def _table(
    holder: Mapping[str, Any], key: str, place: str, expected: str = "a table"
) -> Mapping[str, Any]:
    """Return a table of a table; an empty one where there is none."""
    found = holder.get(key) or {}
    if not isinstance(found, Mapping):
        raise InputError(f"{place}: {key}", found, expected)
    return found


def _list(holder: Mapping[str, Any], key: str, place: str) -> list[Any]:
    found = holder.get(key) or []
    if not isinstance(found, list):
        raise InputError(f"{place}: {key}", "no list", "a list")
    return found


def positive(value: object, place: str) -> int:
    """Return a whole number above 0, which may be a text."""
    try:
        found = int(f"{value}")
    except ValueError:
        found = 0
    if found < 1:
        if UNKNOWN in f"{value}":
            raise undecided(f"{value}", place, "a number")
        raise InputError(place, value, "a whole number from 1")
    return found
