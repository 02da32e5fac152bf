"""Scripts and manifests as the engines that they start, each with its command line."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from minicluster.errors import InputError
from minicluster.plan.vllm_args import KV_ROLES
from sizing.stacks.documents import Table, documents
from sizing.stacks.flags import undecided, unknown
from sizing.stacks.shell import Command, Value, commands

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ENGINE = re.compile(
    r"vllm[\s',\"]+serve\b|vllm\.entrypoints\.(openai\.api_server|cli)|dynamo\.vllm"
)
"""The start of an engine in a text."""

DYNAMO, API_SERVER = "dynamo.vllm", "vllm.entrypoints.openai.api_server"

ONCE = {
    "env", "exec", "nohup", "setsid", "time", "timeout", "command", "sudo", "nice", "ionice",
    "numactl", "taskset", "stdbuf", "uv", "poetry", "conda",
}  # fmt: skip
"""Commands that run the rest of their line once."""

SHELLS = {"sh", "bash", "dash", "zsh"}

SPEAKING = {
    "echo",
    "printf",
    "pkill",
    "pgrep",
    "grep",
    "kill",
    "killall",
    "which",
    "type",
    "command",
}
"""Commands that may name an engine and start none."""

PODS = {"Deployment", "StatefulSet", "ReplicaSet", "Pod", "LeaderWorkerSet"}

HARMLESS = {
    "PersistentVolumeClaim", "PersistentVolume", "StorageClass", "Service", "ServiceAccount", "ConfigMap",
    "Secret", "Namespace", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding", "Ingress",
    "NetworkPolicy", "PodMonitor", "ServiceMonitor", "PodDisruptionBudget", "HTTPRoute", "Gateway",
    "ComputeDomain", "ResourceClaimTemplate", "PriorityClass", "InferenceModel", "InferencePool",
    "DestinationRule", "HTTPProxy",
}  # fmt: skip
"""Kinds of documents that start no engine."""

KINDS_READ = f"a DynamoGraphDeployment, or a {', '.join(sorted(PODS))} of `vllm serve`"

WITHOUT_KIND = {
    "applications": "a Serve config of Ray", "modelArtifacts": "values of a chart of llm-d",
    "services": "a file of docker-compose",
}  # fmt: skip
"""Keys of YAML files that have no kind, and what the files are."""

SERVICE_KEYS = {
    "name", "type", "componentType", "subComponentType", "replicas", "resources", "multinode", "envs",
    "extraPodSpec", "podTemplate",
}  # fmt: skip
"""Keys of a worker of Dynamo that are read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """
    An engine that a file starts.

    Attributes:
        words: the arguments of its server.
        place: file and line, or the name of what starts it.
        dynamo: whether its flags are those of `dynamo.vllm`.
        role: that a manifest gives it; `None`: its arguments say.
        gpus: of all its pods, as a manifest asks for them.
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

    Raises:
        InputError: an engine that runs not at all or more than once as far as the file says.
    """
    found: list[Launch] = []
    others: dict[str, None] = {}
    comments: dict[int, str] = {}
    for command in commands(text, place, variables or {}):
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
        names = ", ".join(name.replace(unknown(""), "") for name in others)
        notes.append(f"{place}: commands that start no engine of vLLM are not read: {names}")
    return found


def of_command(command: Command, notes: list[str]) -> list[Launch]:
    """
    Return the engines that a command starts, through a shell, a container or directly.

    Raises:
        InputError: an engine that something starts of which it is not known how often.
    """
    words, place = command.words, command.place
    names = [word.rpartition("/")[2] for word in words]
    if names[0] in SPEAKING and "-c" not in words:
        return []
    if names[:2] in (["docker", "run"], ["podman", "run"]):
        return _container(command, notes)
    found: list[Launch] = []
    start = _engine(words)
    shell = next((at for at, name in enumerate(names) if name in SHELLS), None)
    if names[0] == "eval":
        found = script(" ".join(words[1:]), place, notes, command.variables)
        start = 0
    elif shell is not None and (start is None or shell < start[0]):
        options = [at for at in range(shell + 1, len(words)) if re.fullmatch(r"-\w*c", words[at])]
        if options and options[0] + 1 < len(words):
            found = script(words[options[0] + 1], place, notes, command.variables)
            start = (shell, 0, False)
    elif start is not None:
        _, after, dynamo = start
        found = [Launch(words=words[after:], place=place, dynamo=dynamo)]
    before = names[: start[0]] if start else names
    if found and not _runs_once(before):
        what = f"{' '.join(before[:3])} before an engine"
        raise InputError(place, what, "an engine that is started once, by vllm serve or python -m")
    if found and command.sometimes:
        what = f"an engine in {command.sometimes}"
        way_out = "write the commands that run, one a line"
        raise InputError(place, what, "engines of which the file says how many run", way_out)
    if not found and ENGINE.search(" ".join((*words, command.text))):
        what = f"{names[0]} with an engine in its arguments or its text"
        raise InputError(place, what, "a command that starts vllm serve itself")
    return found


def _engine(words: Sequence[str]) -> tuple[int, int, bool] | None:
    """Return where a command line of an engine begins, where its arguments do, and if Dynamo's."""
    for at, word in enumerate(words):
        if word.rpartition("/")[2] == "vllm" and words[at + 1 : at + 2] in (("serve",), ["serve"]):
            return at, at + 2, False
        if word in {API_SERVER, DYNAMO}:
            begin = at
            while begin and re.fullmatch(r"-[mu]|.*python[\d.]*", words[begin - 1]):
                begin -= 1
            return begin, at + 1, word == DYNAMO
    return None


def _runs_once(before: Sequence[str]) -> bool:
    """Say whether the words before an engine run it once, with options that have a value at most."""
    if list(before[:2]) in (["docker", "exec"], ["podman", "exec"]):
        return True
    return not before or (
        before[0] in ONCE
        and all(
            word in ONCE or word == "run" or re.match(r"-|\w+=|\d", word) or last.startswith("-")
            for last, word in zip(before, before[1:], strict=False)
        )
    )


def _container(command: Command, notes: list[str]) -> list[Launch]:
    """Return the engines of `docker run`, whose image may start one itself."""
    words = command.words
    image = re.compile(r"(?:[^\s=,]*/)?[\w.-]*vllm[\w.-]*(?:[:@][^/]*)?")
    at = next((n for n in range(2, len(words)) if image.fullmatch(words[n])
               and words[n - 1] not in {"--name", "--network", "-w", "--hostname"}), None)  # fmt: skip
    if at is None:
        return _refused_container(command) if ENGINE.search(" ".join(words)) else []
    inner, entry = list(words[at + 1 :]), [n for n in range(at) if words[n] == "--entrypoint"]
    if entry:
        inner.insert(0, words[entry[0] + 1])
    elif any(word.startswith("--entrypoint=") for word in words[:at]):
        return _refused_container(command)
    elif (
        "vllm-openai" in words[at]
        and _engine(inner) is None
        and not (inner and inner[0].rpartition("/")[2] in SHELLS)
    ):
        inner = ["vllm", "serve", *inner]
    return of_command(replace(command, words=tuple(inner)), notes) if inner else []


def _refused_container(command: Command) -> list[Launch]:
    raise InputError(
        command.place, "a container", "docker run [options] vllm/vllm-openai:… [arguments]"
    )


def manifest(text: str, place: str, notes: list[str]) -> list[Launch]:
    """
    Return the engines of a YAML file's documents.

    Raises:
        InputError: no YAML, or a document of a kind that is not read and may start engines.
    """
    found: list[Launch] = []
    for each in documents(text, place):
        items = (
            each.get("items") if isinstance(each, Table) and each.get("kind") == "List" else None
        )
        for document in items if isinstance(items, list) else [each]:
            found += _document(document, place, notes)
    return found


def _document(document: object, place: str, notes: list[str]) -> list[Launch]:
    if not isinstance(document, Table):
        raise InputError(place, type(document).__name__, "documents that are tables")
    kind, where = str(document.get("kind", "")), f"{place}:{document.line}"
    if kind == "DynamoGraphDeployment":
        return list(_dynamo(document, where, notes))
    if kind in PODS:
        return _pods(document, kind, where, notes)
    if kind in HARMLESS:
        notes.append(f"{where}: a {kind} starts no engine: not read")
        return []
    named = kind or next((name for key, name in WITHOUT_KIND.items() if key in document), "no kind")
    raise InputError(f"{where}: kind", named, KINDS_READ, "`sizing read` takes a script, too")


def _dynamo(document: Table, place: str, notes: list[str]) -> Iterator[Launch]:
    spec = _table(document.get("spec"), f"{place}: spec", "spec.services with a worker")
    listed = spec.get("components")
    services = spec.get("services") or {}
    version = str(document.get("apiVersion", "nvidia.com/v1alpha1"))
    if version.rpartition("/")[2] not in {"v1alpha1", "v1beta1"}:
        raise InputError(f"{place}: apiVersion", version, "nvidia.com/v1alpha1 or v1beta1")
    if listed is not None:
        rows = listed if isinstance(listed, list) else [listed]
        rows = [_table(each, f"{place}: spec.components", "a table") for each in rows]
        services = {str(each.get("name")): each for each in rows}
    label = "services" if listed is None else "components"
    workers = 0
    for name, each in _table(services, f"{place}: spec.services", "a table of workers").items():
        where = f"{place}: spec.{label}.{name}"
        service = _table(each, where, "a table")
        kind = str(service.get("componentType") or service.get("type") or "")
        if kind == "planner":
            notes.append(
                f"{where}: a planner changes the replicas later; those of the file are read"
            )
        if kind not in {"worker", *KV_ROLES}:
            continue
        workers += 1
        role = service.get("subComponentType") or (kind if kind in KV_ROLES else None)
        yield _worker(service, where, str(role) if role else None, spec, notes)
    if not workers:
        raise InputError(place, "no worker", f"spec.{label} with a worker")


def _worker(
    service: Mapping[str, Any], place: str, role: str | None, spec: Table, notes: list[str]
) -> Launch:
    """Return the engine of a worker of Dynamo, in the words of either version of its API."""
    pod = service.get("extraPodSpec") or service.get("podTemplate") or {}
    pod = _table(pod, f"{place}: extraPodSpec", "a table")
    main = pod.get("mainContainer")
    if main is None:
        inner = _table(pod.get("spec") or {}, f"{place}: podTemplate.spec", "a table")
        main = next(
            (e for e in inner.get("containers") or () if e.get("name", "main") == "main"), {}
        )
    main = _table(main, f"{place}: mainContainer", "a mainContainer with lists of command and args")
    variables = [*_list(spec, "envs", place), *_list(service, "envs", place)]
    started = _started(main, place, variables, notes)
    if len(started) != 1 or not started[0].dynamo:
        shown = " ".join(map(str, [*(main.get("command") or ()), *(main.get("args") or ())]))[:60]
        raise InputError(place, shown or None, "a worker of dynamo.vllm: python3 -m dynamo.vllm …")
    unread = sorted(map(str, set(service) - SERVICE_KEYS))
    if unread:
        notes.append(f"{place}: without effect on the plan: {', '.join(unread)}")
    nodes = _table(service.get("multinode") or {}, f"{place}: multinode", "a table")
    count = positive(nodes.get("nodeCount", 1), f"{place}: multinode.nodeCount")
    gpus = _gpus(service, place) or _gpus(main, place)
    return replace(
        started[0], role=role, replicas=positive(service.get("replicas", 1), f"{place}: replicas"),
        gpus=gpus and gpus * count,
    )  # fmt: skip


def _pods(document: Table, kind: str, place: str, notes: list[str]) -> list[Launch]:
    spec = _table(document.get("spec"), f"{place}: spec", "a table")
    size, name = (
        1,
        f"{place}: {kind} {_table(document.get('metadata') or {}, place, 'a table').get('name')}",
    )
    template: Any = document if kind == "Pod" else spec.get("template")
    if kind == "LeaderWorkerSet":
        group = _table(spec.get("leaderWorkerTemplate"), f"{name}: leaderWorkerTemplate", "a table")
        size = positive(group.get("size", 1), f"{name}: size")
        template = group.get("leaderTemplate") or group.get("workerTemplate")
    pod = _table(
        _table(template, f"{name}: template", "a table").get("spec"), f"{name}: spec", "a table"
    )
    found = []
    for container in pod.get("containers") or ():
        main = _table(container, f"{name}: containers", "tables")
        gpus = _gpus(main, name)
        started = _started(main, f"{name}: {main.get('name')}", [], notes)
        count = positive(spec.get("replicas", 1) if kind != "Pod" else 1, f"{name}: replicas")
        found += [replace(each, replicas=each.replicas * count, gpus=gpus and gpus * size)
                  for each in started]  # fmt: skip
    if not found:
        notes.append(f"{name} starts no engine: not read")
    return found


def _started(
    container: Mapping[str, Any], place: str, outer: Sequence[Any], notes: list[str]
) -> list[Launch]:
    """Return the engines of a container: its command, or the one of vLLM's image."""
    variables: dict[str, Value] = {}
    for row in [*outer, *_list(container, "env", place)]:
        each = _table(row, f"{place}: env", "tables of name and value")
        value = each.get("value")
        name = str(each.get("name"))
        variables[name] = unknown(f"${name}") if value is None else str(value)

    def known(text: str) -> str:
        return re.sub(r"\$\((\w+)\)", lambda m: str(variables.get(m[1], unknown(m[0]))), text)

    words = [
        known(str(each)) for key in ("command", "args") for each in _list(container, key, place)
    ]
    if not container.get("command") and "vllm-openai" in str(container.get("image", "")):
        words = ["vllm", "serve", *words]
    if not words:
        return []
    return of_command(Command(words=tuple(words), place=place, variables=variables), notes)


def _gpus(holder: Mapping[str, Any], place: str) -> int | None:
    """Return the GPUs that a pod asks for; `None`: it does not say."""
    resources = _table(holder.get("resources") or {}, f"{place}: resources", "a table")
    for kind in ("limits", "requests"):
        table = _table(resources.get(kind) or {}, f"{place}: resources.{kind}", "a table")
        for key in ("gpu", "nvidia.com/gpu", "amd.com/gpu"):
            if key in table:
                return positive(table[key], f"{place}: resources.{kind}.{key}")
    return None


def _table(value: object, place: str, expected: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InputError(place, value if isinstance(value, str | int) else None, expected)
    return value


def _list(holder: Mapping[str, Any], key: str, place: str) -> list[Any]:
    found = holder.get(key) or []
    if isinstance(found, str) or not isinstance(found, list):
        raise InputError(f"{place}: {key}", str(found)[:60], "a list")
    return found


def positive(value: object, place: str) -> int:
    """Return a whole number above 0, which may be a text."""
    try:
        found = int(str(value))
    except ValueError:
        found = 0
    if found < 1:
        shown = value if isinstance(value, str | int | float | list) else str(value)
        raise (
            undecided(str(value), place, "a number")
            if unknown("") in str(value)
            else InputError(place, shown, "a whole number from 1")
        )
    return found
