"""Spans that say the same request twice: of a gateway and of the engine behind it."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

from minicluster.errors import Fault, InputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Key = tuple[str, str]
"""Ids of a trace and of a span."""


class Span(NamedTuple):
    """
    A request's span.

    Attributes:
        place: file and line.
        key: its ids.
        tokens: of its prompt and its answer.
        times: its begin and its end, as the file has them; the end `None` where it has none.
    """

    place: str
    key: Key
    tokens: tuple[int, int]
    times: tuple[Any, Any]


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
            two spans of one id have different ones, or one of a trace ran while another one with
            the same tokens did, and the span above it is not in the file.
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
    _refuse_strays([span for at, span in enumerate(spans) if at not in again], parents)
    return again


def _refuse_strays(spans: Sequence[Span], parents: Mapping[Key, Key | None]) -> None:
    alike: dict[tuple[str, tuple[int, int]], list[Span]] = defaultdict(list)
    for span in spans:
        alike[span.key[0], span.tokens].append(span)
    for group in alike.values():
        ended = [span for span in group if span.times[1] is not None]
        ended.sort(key=lambda span: str(span.times[1]), reverse=True)
        ended.sort(key=lambda span: str(span.times[0]))
        outer = ended[0] if ended else None
        for inner in ended[1:]:
            above = parents.get(inner.key)
            is_within = outer is not None and str(inner.times[1]) <= str(outer.times[1])
            if is_within and above is not None and above not in parents:
                raise InputError(
                    f"{inner.place}: span {inner.key[1]}",
                    Fault("is within another of the same trace and the same tokens"),
                    f"span {above[1]} above it, which says whether both are one request",
                    "add the spans between them, or leave those of one service out of the file",
                )
            outer = outer if is_within else inner


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
            Fault(f"has {prompt} + {answer} tokens, and {other.place} {its_prompt} + {its_answer}"),
            "the tokens of the one request below it, or the sum of several",
            "leave the spans of one of the services out of the file",
        )
