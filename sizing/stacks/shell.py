"""
A shell script as the commands that it runs; nothing is run.

The grammar is tree-sitter's of bash (ADR 0020). What the file does not decide (a variable that it
does not set, the output of a command) is marked as unknown in the words that it is part of, and
what does not run exactly once has the reason.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

import tree_sitter_bash
from tree_sitter import Language, Parser

from minicluster.errors import InputError
from sizing.stacks.flags import unknown

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from tree_sitter import Node

Value = str | tuple[str, ...]
"""Value of a variable: a text, or an array."""

COMMENT = re.compile(r"#\s*(?:(?:prefill|decode|mixed): )?(\d+) replicas?\b")
"""Comment above a command with the number of times that it runs."""

SOMETIMES = {
    "if_statement": "an `if`", "while_statement": "a `while` or `until`",
    "case_statement": "a `case`", "select_statement": "a `select`",
    "c_style_for_statement": "a counting `for ((…))`", "function_definition": "a function",
}  # fmt: skip
"""Statements whose parts run a number of times that is known only at run time."""

SETTING = {"source", ".", "eval", "read", "let", "mapfile", "readarray", "getopts"}
"""Commands that set variables in ways that are not followed."""

TEST = re.compile(r"!|\[|(\(\(|test|grep|command|which|pgrep|false)\b")
"""Begins of commands that decide whether what follows them runs."""

BRACES = re.compile(r"\{[^{}]*(,|\.\.)[^{}]*\}|[*?]")
"""Patterns that bash expands to several words, or to names of files."""

EXPANSION = re.compile(r"\$\{?(\w+)(\[[@*]\])?(?:(:?[-=])(.*))?\}?", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """
    A simple command.

    Attributes:
        words: expanded words, without redirections and assignments; what is unknown is marked.
        place: file and line.
        sometimes: reason why it may run not at all, or more than once; `None`: it runs once.
        environment: variables that it finds set.
        text: its text, with its here-document.
        comment: times that the last comment before it says that it runs, and that comment's line.
    """

    words: tuple[str, ...]
    place: str
    sometimes: str | None = None
    environment: Mapping[str, Value] = field(default_factory=dict)
    text: str = ""
    comment: tuple[int, int] = (1, 0)


def commands(
    text: str, place: str, environment: Mapping[str, Value], notes: list[str]
) -> list[Command]:
    """
    Return the commands of a script, once for each round of a loop over a list.

    Args:
        environment: variables that it finds set.
        notes: list that gets a sentence on variables that are taken at their default.

    Raises:
        InputError: a text that bash would not take.
    """
    source = text.replace("\r\n", "\n")
    root = _parser().parse(source.encode()).root_node
    if root.has_error:
        line = _first_error(root).start_point[0]
        shown = (source.split("\n")[line].strip() or "the end of the file")[:60]
        raise InputError(f"{place}:{line + 1}", shown, "a shell command")
    script = _Script(place, environment)
    script.follow(root)
    if script.defaults:
        taken = ", ".join(f"${name} is taken as {to}" for name, to in script.defaults.items())
        notes.append(f"{place}: {taken}, the default: the environment may say otherwise")
    return script.commands


@cache
def _parser() -> Parser:
    return Parser(Language(tree_sitter_bash.language()))


def _first_error(node: Node) -> Node:
    inner = next((child for child in node.children if child.has_error), None)
    return node if inner is None else _first_error(inner)


def _line(node: Node) -> int:
    return node.start_point[0] + 1


def _text(node: Node | None) -> str:
    return "" if node is None or node.text is None else node.text.decode()


class _Script:
    """Follows statements, each by the method of its kind; `defaults` are the values assumed."""

    def __init__(self, place: str, environment: Mapping[str, Value]) -> None:
        self.place, self.variables, self.exported = place, dict(environment), set(environment)
        self.commands: list[Command] = []
        self.defaults: dict[str, str] = {}
        self.sometimes: str | None = None
        self.rounds = 1
        self.comment = (1, 0)

    def follow(self, node: Node) -> None:
        if node.type in SOMETIMES:
            self._maybe(node.named_children, SOMETIMES[node.type])
        else:
            getattr(self, f"_{node.type}", self._inner)(node)

    def _inner(self, node: Node) -> None:
        self._all(node.named_children)

    def _all(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            self.follow(node)

    def _maybe(self, nodes: Iterable[Node], reason: str | None) -> None:
        kept, self.sometimes = self.sometimes, self.sometimes or reason
        self._all(nodes)
        self.sometimes = kept

    def _forget(self, node: Node, by: str) -> None:
        for name in self.variables:
            self.variables[name] = unknown(f"${name} after `{by}` in line {_line(node)}")

    def _comment(self, node: Node) -> None:
        match = COMMENT.match(_text(node))
        self.comment = (int(match[1]), _line(node)) if match else self.comment
        if re.match(r"#SBATCH\s+(-a|--array)", _text(node)):
            self.sometimes = "an array of jobs"

    def _declaration_command(self, node: Node) -> None:
        self._all(part for part in node.named_children if part.type == "variable_assignment")
        if node.children[0].type == "export":
            names = (re.match(r"\w*", _text(part)) for part in node.named_children)
            self.exported |= {name[0] for name in names if name}

    def _list(self, node: Node) -> None:
        first, between, *_, second = node.children
        self.follow(first)
        sure = between.type == "&&" and not TEST.match(_text(first))
        self._maybe([second], None if sure else f"what is left of `{between.type}`")

    def _redirected_statement(self, node: Node) -> None:
        self.follow(node.named_children[0])

    def _subshell(self, node: Node) -> None:
        kept = dict(self.variables)
        self._inner(node)
        self.variables = kept

    def _compound_statement(self, node: Node) -> None:
        if _text(node).startswith("(("):
            self._forget(node, "((…))")
        else:
            self._inner(node)

    def _unset_command(self, node: Node) -> None:
        self._forget(node, "unset")

    def _for_statement(self, node: Node) -> None:
        body, kept = node.child_by_field_name("body"), self.rounds
        words = [w for part in node.children_by_field_name("value") for w in self._words(part)]
        name, reason = _text(node.child_by_field_name("variable")), None
        if not words or any(unknown("") in word for word in words):
            words, reason = [unknown(f"${name}")], "a `for` over what the file does not say"
        elif jump := re.search(r"\b(break|continue|exit)\b", _text(body)):
            reason = f"a `for` with `{jump[0]}`"
        self.rounds *= len(words)
        for word in words:
            self.variables[name] = word
            self._maybe([body] if body else [], reason)
        self.rounds = kept

    def _variable_assignment(self, node: Node) -> None:
        self._assign(node, self.variables)

    def _assign(self, node: Node, into: dict[str, Value]) -> None:
        target, right = (node.child_by_field_name(field) for field in ("name", "value"))
        name = _text(target).partition("[")[0]
        value: Value = ""
        if right is not None and right.type == "array":
            value = tuple(word for part in right.named_children for word in self._words(part))
        elif right is not None:
            value = "".join(_one(piece) for piece, _ in self._pieces(right))
        if node.children[1].type == "+=":
            before = into.get(name, value[:0])
            several = isinstance(value, tuple)
            value = (*_several(before), *_several(value)) if several else _one(before) + _one(value)
        if self.sometimes and into is self.variables:
            value = unknown(f"${name} after {self.sometimes} in line {_line(node)}")
        into[name] = unknown(f"${name}") if "[" in _text(target) else value

    def _command(self, node: Node) -> None:
        assigned: dict[str, Value] = {}
        for part in node.named_children:
            if part.type == "variable_assignment":
                self._assign(part, assigned)
        parts = [*node.children_by_field_name("name"), *node.children_by_field_name("argument")]
        words = tuple(word for part in parts for word in self._words(part))
        if not words:
            return
        waited = self.rounds > 1 and not _in_background(node, words)
        exported = {name: of for name, of in self.variables.items() if name in self.exported}
        redirected = node.parent is not None and node.parent.type == "redirected_statement"
        command = Command(
            words=words, place=f"{self.place}:{_line(node)}", comment=self.comment,
            sometimes=self.sometimes or ("a loop that waits for it: no `&`" if waited else None),
            environment=exported | assigned, text=_text(node.parent if redirected else node),
        )  # fmt: skip
        self.commands.append(command)
        if words[0] in {"exit", "return"} or (words[0] == "exec" and words[1:]):
            self.sometimes = self.sometimes or f"an `{words[0]}` above"
        if words[0] in SETTING and not words[-1].endswith("activate"):
            self._forget(node, words[0])

    def _words(self, node: Node) -> list[str]:
        words, quoted_text = [""], False
        for value, quoted in self._pieces(node):
            parts = _several(value)
            if not quoted and unknown("") not in _one(value):
                parts = [word for part in parts for word in part.split()]
            quoted_text = quoted_text or (quoted and isinstance(value, str))
            words = [*words[:-1], words[-1] + parts[0], *parts[1:]] if parts else words
        return words if quoted_text or words != [""] else []

    def _pieces(self, node: Node) -> Iterator[tuple[Value, bool]]:
        kind, text, parts = node.type, _text(node), node.named_children
        bare = "".join(_text(part) for part in parts if part.type == "word")
        if kind in {"simple_expansion", "expansion"}:
            yield self._expansion(node), False
        elif kind == "brace_expression":
            low, high = (int(_text(part)) for part in parts[:2])
            yield tuple(map(str, range(low, high + 1))) or unknown(text), True
        elif kind == "string":
            yield from self._string(node)
        elif kind == "raw_string":
            yield text[1:-1], True
        elif kind in {"concatenation", "command_name"} and not BRACES.search(bare):
            for part in parts:
                yield from self._pieces(part)
        elif kind in {"word", "number"} and not BRACES.search(text):
            yield re.sub(r"\\(\n|.)", lambda match: match[1].strip("\n"), text), True
        else:
            yield unknown(text), kind == "ansi_c_string"

    def _string(self, node: Node) -> Iterator[tuple[Value, bool]]:
        """Yield what stands between double quotes, with the blanks before an expansion."""
        raw, at = node.text or b"", 1
        ends = [child.end_byte - node.start_byte for child in node.named_children]
        for child, end in zip(node.named_children, ends, strict=True):
            if child.type != "string_content":
                yield _plain(raw[at : end - len(_text(child).lstrip().encode())]), True
                yield from ((value, True) for value, _ in self._pieces(child))
                at = end
        yield _plain(raw[at:-1]), True

    def _expansion(self, node: Node) -> Value:
        """Return the value of `$X`, `${X}`, `${X:-default}` or `${X[@]}`, or what is unknown."""
        text = _text(node).strip()
        match = EXPANSION.fullmatch(text)
        if match is None:
            return unknown(text)
        name, several, operator = match[1], match[2], match[3] or ""
        value = self.variables.get(name)
        if value is not None and (value or ":" not in operator):
            return value if several or isinstance(value, str) else _one(value[:1])
        if not operator:
            return unknown(text)
        default = [part for part in node.named_children if part.type != "variable_name"]
        value = "".join(_one(piece) for part in default for piece, _ in self._pieces(part))
        self.variables |= {name: value} if "=" in operator else {}
        self.defaults[name] = value
        return value


def _in_background(node: Node | None, words: Sequence[str]) -> bool:
    if {"-d", "-dit", "-itd", "--detach"} & {*words}:
        return True
    while node is not None and node.type != "do_group":
        if node.next_sibling is not None and node.next_sibling.type == "&":
            return True
        node = node.parent
    return False


def _plain(raw: bytes) -> str:
    return re.sub(r'\\([\\"$`]|\n)', lambda match: match[1].strip("\n"), raw.decode())


def _one(value: Value) -> str:
    return value if isinstance(value, str) else " ".join(value)


def _several(value: Value) -> list[str]:
    return [value] if isinstance(value, str) else list(value)
