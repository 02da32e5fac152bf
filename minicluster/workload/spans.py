"""Spans that say the same request twice: of a gateway and of the engine behind it."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from minicluster.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Key = tuple[str, str]
"""Ids of a trace and of a span."""


class Span(NamedTuple):
    """A request's span: its place in a file, its ids, and the tokens of its prompt and answer."""

    place: str
    key: Key
    tokens: tuple[int, int]


def repeated(spans: Sequence[Span], parents: Mapping[Key, Key | None]) -> set[int]:
    """
    Return the positions of spans that count no request of their own.

    Of a span and one above it with the same tokens the upper one counts: it begins when the
    request arrived. A span above several, with the sum of their tokens, is no request.

    Args:
        spans: of requests.
        parents: the span above each span of the file, requests or not.

    Raises:
        InputError: tokens of a span are neither those of the one below it nor the sum of several,
            or two spans of one id have different ones.
    """
    at_of: dict[Key, int] = {}
    again: set[int] = set()
    for at, span in enumerate(spans):
        first = spans[at_of.setdefault(span.key, at)]
        if first is not span:
            again.add(at)
            _refuse_unless(first.tokens == span.tokens, span, first)
    below: dict[int, list[int]] = defaultdict(list)
    for key, at in at_of.items():
        above = _request_above(key, parents, at_of)
        if above is not None:
            below[above].append(at)
    for above, children in below.items():
        tokens = [spans[at].tokens for at in children]
        if tokens == [spans[above].tokens]:
            again.update(children)
        else:
            is_sum = tuple(map(sum, zip(*tokens, strict=True))) == spans[above].tokens
            _refuse_unless(is_sum, spans[above], spans[children[0]])
            again.add(above)
    return again


def _request_above(
    key: Key, parents: Mapping[Key, Key | None], requests: Mapping[Key, int]
) -> int | None:
    passed = {key}
    above = parents.get(key)
    while above is not None and above not in passed:
        if above in requests:
            return requests[above]
        passed.add(above)
        above = parents.get(above)
    return None


def _refuse_unless(agree: bool, span: Span, other: Span) -> None:  # noqa: FBT001  (a condition)
    if not agree:
        (prompt, answer), (its_prompt, its_answer) = span.tokens, other.tokens
        raise InputError(
            f"{span.place}: span {span.key[1]}",
            f"of {prompt} + {answer} tokens, and {other.place} of {its_prompt} + {its_answer}",
            "the tokens of the one request below it, or the sum of several",
            "leave the spans of one of the services out of the file",
        )
