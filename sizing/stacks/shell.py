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
    from collections.abc import Iterator, Sequence

    from tree_sitter import Node

Value = str | tuple[str, ...]
"""Of a variable: a text, or an array."""

COMMENT = re.compile(r"#\s*(?:(?:prefill|decode|mixed): )?(\d+) replicas?\b")
"""A comment above a command that says how often it runs."""

SOMETIMES = {
    "if_statement": "an `if`", "while_statement": "a `while` or `until`",
    "case_statement": "a `case`", "select_statement": "a `select`",
    "c_style_for_statement": "a counting `for ((…))`", "function_definition": "a function",
}  # fmt: skip
"""Statements whose parts run not at all, or more than once, as is known only at run time."""

EXPANSION = re.compile(r"\$\{?(\w+)(\[[@*]\])?(?:(:?[-=])(.*))?\}?", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """
    A simple command.

    Attributes:
        words: expanded, without redirections and assignments; what is unknown is marked.
        place: file and line.
        sometimes: why it may run not at all, or more than once; `None`: it runs once.
        variables: that are set for it.
        text: of its here-document.
        said: how often the last comment before it says that it runs, and that comment's line.
    """

    words: tuple[str, ...]
    place: str
    sometimes: str | None = None
    variables: Mapping[str, Value] = field(default_factory=dict)
    text: str = ""
    said: tuple[int, int] = (1, 0)


def commands(text: str, place: str, variables: Mapping[str, Value]) -> list[Command]:
    """
    Return the commands of a script, once for each round of a loop over a list.

    Args:
        text: of the script.
        place: of it, for errors.
        variables: that it finds set.

    Raises:
        InputError: what bash would not take.
    """
    source = text.replace("\r\n", "\n")
    root = _parser().parse(source.encode()).root_node
    if root.has_error:
        line = _first_error(root).start_point[0]
        shown = (source.split("\n")[line].strip() or "the end of the file")[:60]
        raise InputError(f"{place}:{line + 1}", shown, "a shell command")
    script = _Script(place, variables)
    script.follow(root)
    return script.found


@cache
def _parser() -> Parser:
    return Parser(Language(tree_sitter_bash.language()))


def _first_error(node: Node) -> Node:
    inner = next((each for each in node.children if each.has_error), None)
    return node if inner is None else _first_error(inner)


def _text(node: Node | None) -> str:
    return "" if node is None or node.text is None else node.text.decode()


class _Script:
    """Follows the statements of a script; `found` has its commands."""

    def __init__(self, place: str, variables: Mapping[str, Value]) -> None:
        self.place, self.variables = place, dict(variables)
        self.found: list[Command] = []
        self.sometimes: str | None = None
        self.said = (1, 0)

    def follow(self, node: Node, text: str = "") -> None:
        """Follow a statement; *text* is what its here-document says."""
        kind, parts = node.type, node.named_children
        if kind == "comment":
            self._comment(_text(node), node.start_point[0])
        elif kind == "variable_assignment":
            self._assign(node, self.variables)
        elif kind == "command":
            self._command(node, text)
        elif kind == "for_statement":
            self._for(node)
        elif kind in SOMETIMES:
            self._maybe(parts, SOMETIMES[kind])
        elif kind == "list":
            self._list(node)
        elif kind == "redirected_statement":
            here = "".join(_text(each) for each in parts if each.type == "heredoc_redirect")
            self.follow(parts[0], here)
        else:
            kept = dict(self.variables)
            self._all(parts)
            self.variables = kept if kind == "subshell" else self.variables

    def _all(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            self.follow(node)

    def _comment(self, text: str, line: int) -> None:
        said = COMMENT.match(text)
        self.said = (int(said[1]), line) if said else self.said
        if re.match(r"#SBATCH\s+(-a|--array)", text):
            self.sometimes = "an array of jobs"

    def _list(self, node: Node) -> None:
        left, between, right = node.children[0], node.children[1], node.children[-1]
        self.follow(left)
        if between.type == "||" or "test_command" in _kinds(node):
            self._maybe([right], f"what is left of `{between.type}`")
        else:
            self.follow(right)

    def _maybe(self, nodes: Sequence[Node], reason: str) -> None:
        """Follow what may not run, or not once: what it assigns is known no longer."""
        kept, self.sometimes = self.sometimes, self.sometimes or reason
        self._all(nodes)
        self.sometimes = kept

    def _for(self, node: Node) -> None:
        body, values = node.child_by_field_name("body"), node.children_by_field_name("value")
        words = [word for each in values for word in self._words(each)]
        name = _text(node.child_by_field_name("variable"))
        if not words or any(unknown("") in word or "*" in word for word in words):
            self.variables[name] = unknown(f"${name}")
            self._maybe([body] if body else [], "a `for` over what the file does not say")
            return
        for word in words:
            self.variables[name] = word
            self._all([body] if body else [])

    def _assign(self, node: Node, into: dict[str, Value]) -> None:
        name, given = _text(node.child_by_field_name("name")), node.child_by_field_name("value")
        value: Value = ""
        if given is not None and given.type == "array":
            value = tuple(word for each in given.named_children for word in self._words(each))
        elif given is not None:
            value = "".join(_one(each) for each, _ in self._pieces(given))
        if "+=" in _kinds(node):
            before = into.get(name, value[:0])
            value = (
                (*_several(before), *value) if isinstance(value, tuple) else _one(before) + value
            )
        if self.sometimes and into is self.variables:
            value = unknown(f"${name} after {self.sometimes} in line {node.start_point[0] + 1}")
        into[name] = value

    def _command(self, node: Node, text: str) -> None:
        own = dict(self.variables)
        for each in node.named_children:
            if each.type == "variable_assignment":
                self._assign(each, own)
        parts = [*node.children_by_field_name("name"), *node.children_by_field_name("argument")]
        words = tuple(word for each in parts for word in self._words(each))
        if words:
            place = f"{self.place}:{node.start_point[0] + 1}"
            command = Command(
                words=words, place=place, sometimes=self.sometimes, variables=own, text=text,
                said=self.said,
            )  # fmt: skip
            self.found.append(command)
            if words[0] == "exit" or (words[0] == "exec" and words[1:]):
                self.sometimes = self.sometimes or f"an `{words[0]}` above"

    def _words(self, node: Node) -> list[str]:
        """Return the words that one word of the script becomes."""
        words, quoted_text = [""], False
        for value, quoted in self._pieces(node):
            parts = _several(value)
            if not quoted and unknown("") not in _one(value):
                parts = [word for part in parts for word in part.split()]
            quoted_text = quoted_text or (quoted and isinstance(value, str))
            words = [*words[:-1], words[-1] + parts[0], *parts[1:]] if parts else words
        return words if quoted_text or words != [""] else []

    def _pieces(self, node: Node) -> Iterator[tuple[Value, bool]]:
        """Yield the values that a word joins, and whether each is quoted."""
        kind, text = node.type, _text(node)
        if kind in {"simple_expansion", "expansion"}:
            yield self._expansion(node), False
        elif kind == "brace_expression":
            low, high = (int(_text(each)) for each in node.named_children[:2])
            yield tuple(str(each) for each in range(low, high + 1)) or unknown(text), True
        elif kind == "string":
            yield from self._string(node)
        elif kind == "raw_string":
            yield text[1:-1], True
        elif kind in {"concatenation", "command_name"}:
            for each in node.named_children:
                yield from self._pieces(each)
        elif kind in {"word", "number"}:
            yield re.sub(r"\\(\n|.)", lambda each: each[1].strip("\n"), text), True
        else:
            yield unknown(text), kind == "ansi_c_string"

    def _string(self, node: Node) -> Iterator[tuple[Value, bool]]:
        """Yield what stands between double quotes, with the blanks before an expansion."""
        at = node.start_byte + 1
        for child in node.named_children:
            if child.type != "string_content":
                yield (
                    self._plain(node, at, child.end_byte - len(_text(child).lstrip().encode())),
                    True,
                )
                yield from ((value, True) for value, _ in self._pieces(child))
                at = child.end_byte
        yield self._plain(node, at, node.end_byte - 1), True

    @staticmethod
    def _plain(node: Node, begin: int, end: int) -> str:
        """Return a part of what stands between double quotes."""
        raw = (node.text or b"")[begin - node.start_byte : end - node.start_byte].decode()
        return re.sub(r'\\([\\"$`]|\n)', lambda each: each[1].strip("\n"), raw)

    def _expansion(self, node: Node) -> Value:
        """Return the value of `$X`, `${X}`, `${X:-default}` or `${X[@]}`, or what is unknown."""
        text = _text(node).strip()
        found = EXPANSION.fullmatch(text)
        value = self.variables.get(found[1]) if found else None
        if found and value is not None and (value or ":" not in (found[3] or "")):
            return value if found[2] or isinstance(value, str) else value[0]
        if found and found[3]:
            default = [each for each in node.named_children if each.type != "variable_name"]
            value = "".join(_one(each) for part in default for each, _ in self._pieces(part))
            self.variables |= {found[1]: value} if "=" in found[3] else {}
            return value
        return unknown(text)


def _kinds(node: Node) -> set[str]:
    """Return the kinds of what a list or an assignment begins with."""
    first = node.children[0]
    return {each.type for each in (*node.children[:2], *first.named_children)}


def _one(value: Value) -> str:
    return value if isinstance(value, str) else " ".join(value)


def _several(value: Value) -> list[str]:
    return [value] if isinstance(value, str) else list(value)
