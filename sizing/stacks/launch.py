"""Scripts and manifests as the engines that they start, each with its command line."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from minicluster.errors import InputError
from minicluster.plan.vllm_args import KV_ROLES
from sizing.stacks.documents import Table, documents
from sizing.stacks.flags import UNKNOWN, effects, of_table, only, undecided, unknown
from sizing.stacks.shell import Command, Value, commands

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

DYNAMO, API_SERVER, IMAGE = "dynamo.vllm", "vllm.entrypoints.openai.api_server", "vllm-openai"

ENGINE = re.compile(rf"vllm[\s',\"]+serve\b|{re.escape(API_SERVER)}|dynamo\.vllm|{IMAGE}")
"""The start of an engine in a text."""

ENVIRONMENT = re.compile(
    r"(VLLM|LMCACHE|DYN|NIXL)_(?!.*(HOST|PORT|ADDR|ADDRESS|IP|ID|DIR|PATH|ROOT|LEVEL)$)"
)
"""Names of variables of the environment that an engine may depend on: no addresses."""

ADDITIONAL = "VLLM_ADDITIONAL_ARGS"
"""Variable in which KServe's engines find further flags."""

WAY_OUT = "a script of its commands is read; of `serving manifest` the plan says what runs"

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
        environment: variables that it finds set and may depend on.
    """

    words: tuple[str, ...]
    place: str
    replicas: int = 1
    dynamo: bool = False
    role: str | None = None
    gpus: int | None = None
    environment: Mapping[str, Value] = field(default_factory=dict)


def script(
    text: str, place: str, notes: list[str], environment: Mapping[str, Value] | None = None
) -> list[Launch]:
    """
    Return the engines that a shell script starts.

    Args:
        notes: gets a sentence on the commands that start none.
        environment: variables that the script finds set.

    Raises:
        InputError: an engine of which the file does not say how often it runs.
    """
    found: list[Launch] = []
    others: dict[str, None] = {}
    comments: dict[int, str] = {}
    ended = ""
    for command in commands(text, place, environment or {}, notes) if ENGINE.search(text) else ():
        started, name = of_command(command, notes), command.words[0].rpartition("/")[2]
        if name.startswith("-"):
            expected = "a command: the line above it has to end in a backslash"
            raise InputError(command.place, name, expected)
        if not started:
            others[name] = None
            ended = name if found and name in {"wait", "kill", "pkill", "killall"} else ended
            continue
        if ended:
            expected = "engines that run at the same time"
            raise InputError(
                command.place, f"an engine after `{ended}`", expected, "split the file"
            )
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
    words = words[1:] if words[0] in {"sudo", "exec"} and words[1:] else words
    names = [word.rpartition("/")[2].replace(UNKNOWN, "") for word in words]
    engine, shell = _engine(words), _shell(words)
    found: list[Launch] = []
    before: Sequence[str] = ()
    if tuple(names[:2]) in {("docker", "run"), ("podman", "run")}:
        found = _in_container(replace(command, words=words[2:]), notes)
    elif {names[0], " ".join(names[:2])} & {*known["speaking"]}:
        return []
    elif shell is not None and (engine is None or shell[0] < engine[0]):
        found, before = script(shell[1], place, notes, command.environment), names[: shell[0]]
    elif engine is not None:
        begin, end, dynamo = engine
        own = {name: of for name, of in command.environment.items() if ENVIRONMENT.match(name)}
        launch = Launch(words=words[end:], place=place, dynamo=dynamo, environment=own)
        found, before = [launch], names[:begin]
        notes += [f"{place}: not read, and not in the prediction: {', '.join(own)}"] if own else []
    if not found and ENGINE.search(" ".join((*words, command.text))):
        shown = f"{names[0]} with an engine in its arguments or its text"
        raise InputError(place, shown, "a command that starts vllm serve itself")
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


def _in_container(command: Command, notes: list[str]) -> list[Launch]:
    """Return the engines of `docker run`."""
    switches, rest = effects()["commands"]["docker_switches"], list(command.words)
    environment: dict[str, Value] = {}
    entry: list[str] = []
    while rest and rest[0].startswith("-"):
        name, equals, value = rest.pop(0).partition("=")
        if not equals and name not in switches and not re.fullmatch(r"-[ditPq]+|-\w.+", name):
            value = rest.pop(0) if rest else ""
        if name in {"-e", "--env"}:
            key, equals, text = value.partition("=")
            environment[key] = text if equals else unknown(f"${key}")
        entry = [value] if name == "--entrypoint" else entry
    if not rest:
        return []
    words = _of_image(rest[0], entry, rest[1:], command.place)
    inner = replace(command, words=words, environment=environment, sometimes=None)
    return of_command(inner, notes) if words else []


def _of_image(
    image: str, command: Sequence[str], args: Sequence[str], place: str
) -> tuple[str, ...]:
    """Return what a container runs: its command, or the one of an image of vLLM."""
    given = (*command, *args)
    if command or not given or _engine(given) or _shell(("", *given)):
        return given
    if IMAGE in image:
        return ("vllm", "serve", *given)
    if given[0].startswith("-"):
        shown = f"{image} with {' '.join(given)[:40]}"
        raise InputError(place, shown, "an image whose command is known: vllm/vllm-openai")
    return given


def manifest(text: str, place: str, notes: list[str]) -> list[Launch]:
    """
    Return the engines of a YAML file's documents.

    Raises:
        InputError: no YAML, or a document of a kind that is not read and may start engines.
    """
    found: list[Launch] = []
    for each in documents(text, place):
        listed = isinstance(each, Table) and each.get("kind") == "List"
        for document in _rows(each, "items", place) if listed else [each]:
            found += _document(document, place, notes)
    return found


def _document(document: object, place: str, notes: list[str]) -> list[Launch]:
    if not isinstance(document, Table):
        raise InputError(place, "a document", "documents that are tables")
    kind, where, known = f"{document.get('kind') or ''}", f"{place}:{document.line}", effects()
    if kind in known["documents"]["harmless"]:
        notes.append(f"{where}: a {kind} starts no engine: not read")
        return []
    for key, (name, read) in READERS.items():
        if kind == key or (not kind and key in document):
            found = list(read(document, where, notes))
            if not found and kind not in PODS:
                raise InputError(f"{where}: kind", name, "one with engines of vLLM")
            if len(found) < sum(_starts(document)) and kind != "LeaderWorkerSet":
                shown = "engines in containers beside those that are read"
                raise InputError(where, shown, "engines in the main containers of workers")
            notes += [] if found else [f"{where}: {kind} starts no engine: not read"]
            return found
    named = kind or ("a file of docker-compose" if "services" in document else None)
    expected = f"a DynamoGraphDeployment, or one of {', '.join((*list(READERS)[1:2], *PODS))}"
    raise InputError(f"{where}: kind", named, expected, WAY_OUT)


def _starts(node: object) -> Iterator[bool]:
    """Yield for each container anywhere in a document whether it seems to start an engine."""
    if isinstance(node, Mapping):
        first = node.get("command") or node.get("image")
        yield ENGINE.search(f"{first} {node.get('args')}") is not None
        node = list(node.values())
    for each in node if isinstance(node, list) else ():
        yield from _starts(each)


def _dynamo(document: Table, place: str, notes: list[str]) -> Iterator[Launch]:
    """Yield the engines of a graph in the words of either version of Dynamo's API."""
    version = f"{document.get('apiVersion') or 'nvidia.com/v1alpha1'}"
    if version.rpartition("/")[2] not in {"v1alpha1", "v1beta1"}:
        raise InputError(f"{place}: apiVersion", version, "nvidia.com/v1alpha1 or v1beta1")
    spec = _table(document, "spec", place, "spec.services with a worker")
    label = "components" if "components" in spec else "services"
    rows = spec.get(label)
    named = rows.items() if isinstance(rows, Mapping) else [
        (each.get("name"), each) for each in _rows(spec, label, place)
    ]  # fmt: skip
    for name, service in named:
        where = f"{place}: spec.{label}.{name}"
        if not isinstance(service, Mapping):
            raise InputError(where, service, "a table")
        kind = service.get("componentType") or service.get("type")
        if kind == "planner":
            notes.append(f"{where}: a planner changes replicas; those of the file are read")
        if kind in ("worker", *KV_ROLES):
            role = service.get("subComponentType") or (kind if kind in KV_ROLES else None)
            if role not in (None, *KV_ROLES):
                shown = role if isinstance(role, str) else "no text"
                raise InputError(f"{where}: subComponentType", shown, "prefill or decode")
            yield replace(_worker(service, where, spec, notes), role=role)


def _worker(
    service: Mapping[str, Any], place: str, spec: Mapping[str, Any], notes: list[str]
) -> Launch:
    only(service, "dynamo_worker", place)
    if "podTemplate" in service:
        pod = _table(_table(service, "podTemplate", place), "spec", f"{place}: podTemplate")
        mains = [each for each in _rows(pod, "containers", place) if each.get("name") == "main"]
        main = mains[0] if mains else {}
    else:
        main = _table(_table(service, "extraPodSpec", place), "mainContainer", place)
    outer = [*_rows(spec, "envs", place), *_rows(service, "envs", place)]
    nodes = positive(_table(service, "multinode", place).get("nodeCount", 1), f"{place}: nodeCount")
    started = _started(main, service, place, notes, nodes=nodes, outer=outer)
    if len(started) != 1 or not started[0].dynamo:
        shown = " ".join(map(str, (*_list(main, "command", place), *_list(main, "args", place))))
        expected = "a worker of dynamo.vllm: python3 -m dynamo.vllm"
        raise InputError(place, shown[:60] or None, expected)
    gpus = _gpus(service, place)
    return replace(started[0], gpus=gpus * nodes) if gpus else started[0]


def _pods(document: Table, place: str, notes: list[str]) -> Iterator[Launch]:
    """Yield the engines of pods: of a group of them, those of the first."""
    kind, spec = document["kind"], _table(document, "spec", place)
    where, group = f"{place}: {kind}", _table(spec, "leaderWorkerTemplate", place)
    one = "leaderTemplate" if "leaderTemplate" in group else "workerTemplate"
    holder = _table(group, one, where) if group else _table(spec, "template", where)
    pod, nodes = _table(holder, "spec", where), positive(group.get("size", 1), f"{where}: size")
    if kind == "Pod":
        pod, spec = spec, {}
    for main in _rows(pod, "containers", where):
        for each in _started(main, spec, where, notes, nodes=nodes):
            if nodes > 1 and each.gpus is None:
                raise InputError(f"{where}: resources", None, "the GPUs of each pod of a group")
            yield each


def _started(
    container: Mapping[str, Any],
    holder: Mapping[str, Any],
    place: str,
    notes: list[str],
    *,
    nodes: int = 1,
    outer: Sequence[Any] = (),
) -> list[Launch]:
    """Return the engines of a container in a pod; *holder* says how many pods there are."""
    environment: dict[str, Value] = {}
    for row in [*outer, *_rows(container, "env", place)]:
        name, value = row.get("name"), row.get("value")
        environment[f"{name}"] = unknown(f"${name}") if value is None else f"{value}"
    entry, args = (
        [re.sub(r"\$\((\w+)\)", lambda m: str(environment.get(m[1], unknown(m[0]))), f"{word}")
         for word in _list(container, key, place)]
        for key in ("command", "args")
    )  # fmt: skip
    words = _of_image(f"{container.get('image')}", entry, args, place)
    gpus = _gpus(container, place)
    replicas = positive(holder.get("replicas", 1), f"{place}: replicas")
    command = Command(words=words, place=place, environment=environment)
    return [
        replace(each, replicas=each.replicas * replicas, gpus=gpus and gpus * nodes)
        for each in (of_command(command, notes) if words else ())
    ]


def _charted(document: Table, place: str, notes: list[str]) -> Iterator[Launch]:
    """Yield the engines of a LLMInferenceService of KServe, or of values of llm-d's chart."""
    kserve = "kind" in document
    spec = _table(document, "spec", place) if kserve else document
    only(spec, "kserve" if kserve else "llm_d", place)
    source = _table(spec, "model" if kserve else "modelArtifacts", place).get("uri")
    pools = {"decode": spec if kserve else _table(spec, "decode", place)}
    pools |= {"prefill": _table(spec, "prefill", place)}
    pools = {role: pool for role, pool in pools.items() if pool and pool.get("create", True)}
    for role, pool in pools.items():
        where = f"{place}: {role}"
        only(pool, "kserve" if kserve else "llm_d_pool", where)
        sizes = _table(pool, "parallelism", where)
        only(sizes, "parallelism", where)
        ranks = [positive(sizes.get(key, 1), f"{where}: {key}") for key in ("data", "dataLocal")]
        spread = ranks[0] // ranks[1] if "dataLocal" in sizes else 1
        nodes = positive(sizes.get("workers", spread), f"{where}: workers")
        words = ["vllm", "serve", *([f"{source}".removeprefix("hf://")] if source else [])]
        for name in ("tensor", "pipeline", "data"):
            words += [f"--{name}-parallel-size", f"{sizes[name]}"] if name in sizes else []
        words += ["--enable-expert-parallel"] if sizes.get("expert") else []
        for main in _rows(_table(pool, "template", where) if kserve else pool, "containers", where):
            only(main, "kserve_container" if kserve else "llm_d_container", where)
            env = _rows(main, "env", where)
            text = shlex.join([*words, *map(str, _list(main, "args", where))])
            for row in env:
                text += f" {row.get('value')}" if row.get("name") == ADDITIONAL else ""
            inner = {**main, "command": ["sh", "-c", text], "args": []}
            inner["env"] = [row for row in env if row.get("name") != ADDITIONAL]
            if "worker" in pool and "dataLocal" not in sizes:  # of how many nodes is not said
                inner["resources"] = {}
            key, named = ("name", "main") if kserve else ("modelCommand", "vllmServe")
            if main.get(key) != named:
                raise InputError(f"{where}: {key}", main.get(key), named)
            for each in _started(inner, pool, where, notes, nodes=nodes):
                yield replace(each, role=role if len(pools) > 1 else None)


def _ray(document: Table, place: str, _notes: list[str]) -> Iterator[Launch]:
    """Yield the engines of Ray Serve LLM's applications, whose arguments are a table."""
    for each in _rows(document, "applications", place):
        path, args = f"{each.get('import_path')}", _table(each, "args", place)
        if not path.startswith("ray.serve.llm:build_"):
            raise InputError(f"{place}: import_path", path, "ray.serve.llm:build_…", WAY_OUT)
        only(args, "ray", place)
        rows = [(None, row) for row in _rows(args, "llm_configs", place)]
        split = [(role, _table(args, f"{role}_config", place)) for role in KV_ROLES]
        for role, row in [*rows, *(each for each in split if each[1])]:
            only(row, "ray_llm", place)
            model = _table(row, "model_loading_config", place)
            source = model.get("model_source") or model.get("model_id")
            words = of_table(_table(row, "engine_kwargs", place))
            count = _table(row, "deployment_config", place)
            only(count, "ray_deployment", place)
            yield Launch(
                words=(*([f"{source}"] if source else []), *words), place=place, role=role,
                replicas=positive(count.get("num_replicas", 1), f"{place}: num_replicas"),
            )  # fmt: skip


READERS = {
    "DynamoGraphDeployment": ("DynamoGraphDeployment", _dynamo),
    "LLMInferenceService": ("LLMInferenceService", _charted),
    "modelArtifacts": ("values of a chart of llm-d", _charted),
    "applications": ("a Serve config of Ray", _ray),
    **{kind: (kind, _pods) for kind in PODS},
}
"""By kind, or key of a document without one: its name, and what reads it."""


def _gpus(holder: Mapping[str, Any], place: str) -> int | None:
    """Return the GPUs that a pod asks for; `None`: it does not say."""
    resources = _table(holder, "resources", place)
    for kind in ("limits", "requests"):
        table = _table(resources, kind, f"{place}: resources")
        for key, count in table.items():
            if key in {"gpu", "nvidia.com/gpu", "amd.com/gpu"}:
                return positive(count, f"{place}: resources.{kind}.{key}")
            if re.search("gpu|mig|tpu|gaudi|neuron|npu|ascend", f"{key}".lower()):
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


def _rows(holder: Mapping[str, Any], key: str, place: str) -> list[Mapping[str, Any]]:
    found = _list(holder, key, place)
    if not all(isinstance(each, Mapping) for each in found):
        raise InputError(f"{place}: {key}", "a list of other things", "a list of tables")
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
