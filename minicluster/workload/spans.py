"""Requests of a trace, and spans that say one twice: of a gateway and of the engine behind it."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from minicluster.errors import Fault, InputError

if TYPE_CHECKING:
    from collections.abc import Container, Mapping, Sequence

    from minicluster.workload.schedule import ScheduledRequest

Key = tuple[str, str]
"""Ids of a trace and of a span."""


class Request(NamedTuple):
    """
    A request as its line has it.

    Attributes:
        place: file and line.
        row: all but its time, and the content that `ids` name.
        key, at: its time, a number or a text, and the key that it stands under.
        took_s: from its arrival to `at`.
        ids: of the blocks of its prompt.
        span: its ids, if it is one.
    """

    place: str
    row: ScheduledRequest
    key: str
    at: object
    took_s: float
    ids: tuple[int, ...]
    span: Key | None

    @property
    def tokens(self) -> tuple[int, int]:
        """Of prompt and answer."""
        return self.row.input_tokens, self.row.output_tokens


def repeated(requests: Sequence[Request], parents: Mapping[Key, Key | None]) -> set[int]:
    """
    Return the positions of requests whose spans count none of their own.

    Of a span and one above it with the same tokens the upper one counts: it begins when the
    request arrived. A span above several, with the sum of their tokens, is no request.

    Args:
        requests: those without a span count.
        parents: the span above each span of the file, requests or not.

    Raises InputError: tokens of a span are neither those of the one below it nor the sum of
    several, two spans of one id have different ones, or two of a trace have the same and a span
    above one of them is not in the file.
    """
    at_of: dict[Key, int] = {}
    again: set[int] = set()
    for at, each in enumerate(requests):
        if each.span is not None and at_of.setdefault(each.span, at) != at:
            again.add(at)
            first = requests[at_of[each.span]]
            _refuse_unless(first.tokens == each.tokens, each, first)
    below: dict[int, list[int]] = defaultdict(list)
    absent: dict[int, Key] = {}
    for key, at in at_of.items():
        above = _above(key, parents, at_of)
        if above in at_of:
            below[at_of[above]].append(at)
        elif above is not None:
            absent[at] = above
    for at, children in below.items():
        tokens = [requests[each].tokens for each in children]
        is_sum = tokens != [requests[at].tokens]
        agree = not is_sum or tuple(map(sum, zip(*tokens, strict=True))) == requests[at].tokens
        _refuse_unless(agree, requests[at], requests[children[0]])
        again |= {at} if is_sum else set(children)
    _refuse_strays({at: requests[at] for at in at_of.values() if at not in again}, absent)
    return again


def _refuse_strays(spans: Mapping[int, Request], absent: Mapping[int, Key]) -> None:
    """Refuse spans that may be one request: which is above which, a span says that is absent."""
    alike: dict[tuple[str, tuple[int, int]], int] = {}
    for at, each in spans.items():
        trace, span = each.span or ("", "")
        first = alike.setdefault((trace, each.tokens), at)
        missing = absent.get(at) or absent.get(first)
        if missing and absent.get(at) != absent.get(first):
            raise InputError(
                f"{each.place}: span {span}",
                Fault(f"has the trace and the tokens of {spans[first].place}"),
                f"span {missing[1]}, which says whether both are one request",
                "add the spans between them, or leave those of one service out of the file",
            )


def _above(key: Key, parents: Mapping[Key, Key | None], requests: Container[Key]) -> Key | None:
    """Return the nearest span above that is a request, or is not in the file."""
    passed = {key}
    above = parents.get(key)
    while above is not None and above in parents and above not in requests:
        if above in passed:
            return None
        passed.add(above)
        above = parents[above]
    return above


def _refuse_unless(agree: bool, one: Request, other: Request) -> None:  # noqa: FBT001  (a condition)
    if not agree:
        (prompt, answer), (its_prompt, its_answer) = one.tokens, other.tokens
        raise InputError(
            f"{one.place}: span {one.span and one.span[1]}",
            Fault(f"has {prompt} + {answer} tokens, and {other.place} {its_prompt} + {its_answer}"),
            "the tokens of the one request below it, or the sum of several",
            "leave the spans of one of the services out of the file",
        )
