"""The engines that a shell script starts, each with the words of its command line."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from minicluster.errors import Fault, InputError
from sizing.stacks.flags import UNKNOWN, effects, unknown
from sizing.stacks.shell import Command, Value, commands

if TYPE_CHECKING:
    from collections.abc import Sequence

DYNAMO, API_SERVER, IMAGE = "dynamo.vllm", "vllm.entrypoints.openai.api_server", "vllm-openai"

ENGINE = re.compile(rf"vllm[\s',\"]+serve\b|{re.escape(API_SERVER)}|dynamo\.vllm|{IMAGE}")
"""Start of an engine in a text."""

ENVIRONMENT = re.compile(
    r"(VLLM|LMCACHE|DYN|NIXL)_(?!.*(HOST|PORT|ADDR|ADDRESS|IP|ID|DIR|PATH|ROOT|LEVEL)$)"
)
"""Variables of the environment that an engine may depend on: no addresses."""

SHELLS = {"sh", "bash", "dash", "zsh"}

DOCKER, PODMAN = "docker", "podman"


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """
    An engine that a file starts.

    Attributes:
        words: arguments of its server.
        place: file and line, or the name of what starts it.
        dynamo: whether its flags are those of `dynamo.vllm`.
        role: role that a manifest gives it; `None`: its arguments say.
        gpus: GPUs of all pods of a replica, as a manifest asks for them.
        environment: variables that it finds set and may depend on.
    """

    words: tuple[str, ...]
    place: str
    replicas: int = 1
    dynamo: bool = False
    role: str | None = None
    gpus: int | None = None
    environment: Mapping[str, Value] = field(default_factory=dict)


def engines_of_script(
    text: str, place: str, notes: list[str], environment: Mapping[str, Value] | None = None
) -> list[Launch]:
    """
    Return the engines that a shell script starts.

    Args:
        notes: list that gets a sentence on the commands that start none.
        environment: variables that the script finds set.

    Raises:
        InputError: an engine of which the file does not say how often it runs.
    """
    engines: list[Launch] = []
    others: dict[str, None] = {}
    comments: dict[int, str] = {}
    ended = ""
    for command in commands(text, place, environment or {}, notes) if ENGINE.search(text) else ():
        started, name = engines_of_command(command, notes), command.words[0].rpartition("/")[2]
        if name.startswith("-"):
            expected = "a command: the line above it has to end in a backslash"
            raise InputError(command.place, name, expected)
        if not started:
            others[name] = None
            ended = name if engines and name in {"wait", "kill", "pkill", "killall"} else ended
            continue
        if ended:
            fault = Fault(f"starts an engine after `{ended}`")
            expected = "a file of engines that run at the same time"
            raise InputError(command.place, fault, expected, "split the file")
        replicas, line = command.comment
        if comments.get(line) == command.place and replicas > 1:
            expected = "no comment that says so above a loop, whose rounds are counted"
            raise InputError(command.place, f"{replicas} replicas", expected)
        replicas = 1 if line in comments else replicas
        comments.setdefault(line, command.place)
        engines += [replace(engine, replicas=engine.replicas * replicas) for engine in started]
    if engines and others:
        names = ", ".join(others).replace(UNKNOWN, "")
        notes.append(f"{place}: commands that start no engine of vLLM are not read: {names}")
    return engines


def engines_of_command(command: Command, notes: list[str]) -> list[Launch]:
    """
    Return the engines that a command starts: directly, through a shell or in a container.

    Raises:
        InputError: an engine that something starts of which it is not known how often.
    """
    words, place = command.words, command.place
    words = words[1:] if words[0] in {"sudo", "exec"} and words[1:] else words
    names = [word.rpartition("/")[2].replace(UNKNOWN, "") for word in words]
    engine, shell = _engine(words), _shell(words)
    engines: list[Launch] = []
    before: Sequence[str] = ()
    if names[0] in {DOCKER, PODMAN} and names[1:2] == ["run"]:
        engines = _in_container(replace(command, words=words[2:]), notes)
    elif {names[0], " ".join(names[:2])} & {*effects()["commands"]["speaking"]}:
        return []
    elif shell is not None and (engine is None or shell[0] < engine[0]):
        engines = engines_of_script(shell[1], place, notes, command.environment)
        before = names[: shell[0]]
    elif engine is not None:
        begin, end, dynamo = engine
        variables = {k: v for k, v in command.environment.items() if ENVIRONMENT.match(k)}
        if variables:
            notes.append(f"{place}: not read, and not in the prediction: {', '.join(variables)}")
        launch = Launch(words=words[end:], place=place, dynamo=dynamo, environment=variables)
        engines, before = [launch], names[:begin]
    if not engines and ENGINE.search(" ".join((*words, command.text))):
        fault = Fault(f"starts {names[0]} with an engine in its arguments or its text")
        raise InputError(place, fault, "a command that starts vllm serve itself")
    if engines:
        _check_once(command, before)
    return engines


def _check_once(command: Command, before: Sequence[str]) -> None:
    """Refuse an engine that does not run once; an option before it may have one value."""
    once = effects()["commands"]["once"]
    in_container = [*before[:2]] in ([DOCKER, "exec"], [PODMAN, "exec"])
    if not in_container and not all(
        word in once or re.match(r"-|\w+=|\d", word) or last.startswith("-")
        for last, word in pairwise(["", *before])
    ):
        fault = Fault(f"has {' '.join(before[:3])} before an engine")
        raise InputError(command.place, fault, "vllm serve or python -m, started once")
    if command.sometimes:
        expected = "a file that says how many engines run"
        way_out = "write each command that runs on a line of its own"
        fault = Fault(f"has an engine in {command.sometimes}")
        raise InputError(command.place, fault, expected, way_out)


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


def _in_container(command: Command, notes: list[str]) -> list[Launch]:
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
    return engines_of_image(rest[0], entry, rest[1:], environment, command.place, notes)


def engines_of_image(
    image: str,
    entry: Sequence[str],
    args: Sequence[str],
    environment: Mapping[str, Value],
    place: str,
    notes: list[str],
) -> list[Launch]:
    """
    Return the engines of a container: those of its command, or of an image of vLLM.

    Raises:
        InputError: arguments for an image whose command is not known, or as `engines_of_command`.
    """
    words = (*entry, *args)
    if not words:
        return []
    if not entry and _engine(words) is None and _shell(("", *words)) is None:
        if IMAGE in image:
            words = ("vllm", "serve", *words)
        elif words[0].startswith("-"):
            fault = Fault(f"starts {image} with {' '.join(words)[:40]}")
            raise InputError(place, fault, "an image whose command is known: vllm/vllm-openai")
    return engines_of_command(Command(words=words, place=place, environment=environment), notes)
