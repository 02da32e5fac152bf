"""The requests of a trace's file as its lines have them, before their times have a unit."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minicluster.errors import Fault, InputError, written
from minicluster.workload.arrivals import CONTENT_TOKENS
from minicluster.workload.records import flat, read_records
from minicluster.workload.schedule import ScheduledRequest
from minicluster.workload.trace_formats import FORMATS, Format, Meaning, format_of, meaning
from minicluster.workload.trace_times import Key, Request, epoch_unit, number_of

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping, Sequence


KNOWN = "a log (JSON lines or CSV with time, prompt_tokens, output_tokens), or " + ", ".join(
    each.title for each in FORMATS.values() if each.keys
)
IMAGE = re.compile(
    r"(?<![a-z])a?(image|audio|video|vision|multimodal|transcription|speech)"
    r"|^(input_)?file$|^document$",
    re.IGNORECASE,
)
"""Types of requests, and of parts of them, that are no text."""
NO_IMAGE = re.compile(r"[\s0.]*|none|null|false|\[\]|[\w./@-]+:[\w.-]+", re.IGNORECASE)
"""Texts under a key of images that are none: zero, and a container's name and tag."""
MAX_SESSIONS = 1 << 31  # bound of the numbers of conversations; a larger one is a mistake


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadAs:
    """
    How a trace was read.

    Attributes:
        form: format that the file was taken for.
        left_out: number of rows or requests that were left out, by the reason.
        unread: keys whose meaning is unknown.
    """

    form: str
    left_out: dict[str, int] = field(default_factory=dict)
    unread: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """Say it all."""
        more = len(self.unread) - 12
        keys = ", ".join(self.unread[:12]) + (f" and {more} more" if more > 0 else "")
        return [
            f"read as {self.form}",
            *(f"left out: {count:,} {reason}" for reason, count in self.left_out.items() if count),
            *([f"keys that are not read: {keys}"] if keys else []),
        ]


Pair = tuple[str, Any]
Facts = defaultdict[str, list[Pair]]  # what a record says, by what its keys mean: keys and values


@dataclass(slots=True, kw_only=True)
class RequestFile:
    """A file of requests, and what of it was read as what; see `ReadAs`."""

    path: Path
    skip_images: bool
    format: Format = FORMATS["log"]
    known: bool = False
    left_out: Counter[str] = field(default_factory=Counter)
    unread: dict[str, None] = field(default_factory=dict)

    def read(self) -> list[Request]:
        """
        Return the requests in the file's order, each once; at least one.

        Raises InputError: no such file, no requests, or a record that cannot be one.
        """
        requests: list[Request] = []
        parents: dict[Key, Key | None] = {}
        lines: dict[tuple[object, ...], str] = {}
        keys: list[str] = []
        for place, record in read_records(self.path, KNOWN):
            keys = keys or list(record)
            try:
                facts = self._facts(record)
                span, above = _span_ids(facts)
                if span is not None:
                    parents[span] = above
                if self._counts(record, facts):
                    requests.append(self._request(place, record, facts, span))
                    if span is None and self.format is not FORMATS["access"]:
                        _refuse_again(requests[-1], facts, lines)
            except InputError as error:
                raise error.inside(place) from None
            except (TypeError, ValueError, OverflowError, RecursionError) as error:
                expected = "a request with a time and whole numbers of tokens"
                raise InputError(place, Fault(f"is {error}"), expected) from None
        if not requests:
            named = f": its keys are {', '.join(keys[:12])}" if keys else ""
            raise InputError(f"{self.path}:1", Fault(f"is a trace without requests{named}"), KNOWN)
        again = repeated(requests, parents)
        self.left_out["spans of requests that other spans are, too"] += len(again)
        return [each for at, each in enumerate(requests) if at not in again]

    def _facts(self, record: dict[str, Any]) -> Facts:
        facts: Facts = defaultdict(list)
        for key, value in flat({key: _decoded(value) for key, value in record.items()}):
            means = meaning(key)
            if value is None or value == "":
                continue
            if means is not None:
                facts[means.what].append((key, value))
            if (means is None and "[]" not in key) or (means and means.what == "session"):
                self.unread[key] = None
        return facts

    def _counts(self, record: dict[str, Any], facts: Facts) -> bool:
        """Say whether a record is a request that counts; refuse one that cannot."""
        is_request = bool(facts["prompt"] and facts["answer"])
        if not self.known:
            self.format = format_of(record)
            self.known = is_request or self.format.only_requests
        made = self.format.only_requests
        if not is_request and not made:
            self.left_out["lines without token counts"] += 1
            return False
        for key in self.format.keys if made else ():
            if record.get(key) in {None, ""}:
                raise InputError(key, None, f"a value: {self.format.title} has it")
        _refuse_several(facts, made=made)
        images = media(facts["images"] + facts["kind"])
        if images is not None and not self.skip_images:
            expected = "none: lengths in tokens do not say what images, audio or video cost"
            raise InputError(*images, expected, "--skip-images leaves such requests out")
        if images is not None:
            self.left_out["requests with images, audio or video"] += 1
        return images is None

    def _request(
        self, place: str, record: dict[str, Any], facts: Facts, span: Key | None
    ) -> Request:
        if not facts["time"]:
            raise ValueError("a request without a time")
        key, at = min(facts["time"], key=_doubt)
        prompt, answer = (_tokens(facts[side]) for side in ("prompt", "answer"))
        row = ScheduledRequest(index=0, due_s=0.0, input_tokens=prompt, output_tokens=answer)
        if self.format is FORMATS["schedule"]:
            row = _scheduled(record, row)
        took_s = float(record.get("seconds", 0)) if self.format is FORMATS["access"] else 0.0
        ids = _ids(*facts["blocks"][0]) if facts["blocks"] else ()
        return Request(place, row, key, at, took_s, ids, span)


def media(pairs: Iterable[Pair]) -> Pair | None:
    """Return key and value of the first image, audio or video in what `flat` gives of a record."""
    for key, value in pairs:
        what = getattr(meaning(key), "what", None)
        some = not NO_IMAGE.fullmatch(value) if isinstance(value, str) else value
        if (what == "images" and some) or (what == "kind" and IMAGE.search(str(value))):
            return key, value
    return None


def _decoded(value: object) -> object:
    """Decode a list or an object that was written as a text, as in cells of CSV."""
    with suppress(ValueError, RecursionError):
        if isinstance(value, str) and value.startswith(("[", "{")):
            return json.loads(value)
    return value


def _refuse_again(request: Request, facts: Facts, lines: dict[tuple[object, ...], str]) -> None:
    """Refuse a second line of one id and prompt: of an answer in parts, or of two programs."""
    for key, value in facts["id"]:
        # A plain id may be of something else, unless its lines came at one time.
        at = None if "request" in key.lower() else str(request.at)
        before = lines.setdefault((str(value), request.row.input_tokens, at), request.place)
        if before != request.place:
            expected = f"another one than {before} has, with the same prompt"
            raise InputError(key, value, expected, "keep one line of each request")


def _refuse_several(facts: Facts, *, made: bool) -> None:
    """Refuse what is no request by itself, and tokens that are not all of it."""
    waits = facts["waits"] + (facts["turns"] if made or facts["session"] else [])
    for key, value in waits + (facts["parent"] if made else []):
        if value not in ([], -1, "-1"):
            expected = "none: when a request comes that waits for another, no trace can say"
            way_out = "give rows that wait for none, or draw them: --users or --turns, and --seed"
            raise InputError(key, value, expected, way_out)
    for key, value in facts["several"]:
        if str(len(value) if isinstance(value, list) else value) not in {"1", "1.0"}:
            expected = "1: of several answers, or requests, in one row this gives no lengths"
            raise InputError(key, value, expected)
    whole_prompt = any("prompt" in key for key, _ in facts["prompt"])
    for key, value in facts["beside"] + ([] if whole_prompt else facts["beside_input"]):
        if str(value) not in {"0", "0.0"}:
            expected = "none: other counts of the row may contain these tokens or not"
            way_out = "write the sums as prompt_tokens and completion_tokens"
            raise InputError(key, value, expected, way_out)


def _doubt(time: Pair) -> tuple[bool, int, int]:
    """Order the times of a record: dates and those with a unit before others, which may be long."""
    key, number, means = time[0], number_of(time[1]), meaning(time[0]) or Meaning("time")
    is_count = number is not None and means.unit is None and epoch_unit(number) is None
    return is_count, key.count("."), means.rank


def _tokens(counts: list[Pair]) -> int:
    values = {whole(key, value): key for key, value in counts}
    if len(values) > 1:
        (one, key), (other, other_key), *_ = values.items()
        raise InputError(key, one, f"what {other_key} says, which is {other}")
    return next(iter(values), 0)


def _span_ids(facts: Facts) -> tuple[Key | None, Key | None]:
    own = facts["span"] or facts["id"]
    if not facts["trace"] or not own:
        return None, None
    trace = str(facts["trace"][0][1])
    # Datadog and others write zeros where there is none above.
    above = [str(value) for _, value in facts["parent"] if str(value).strip("0")]
    return (trace, str(own[0][1])), (trace, above[0]) if above else None


def _scheduled(record: dict[str, Any], row: ScheduledRequest) -> ScheduledRequest:
    keys = ("prefix_tokens", "session", "adapter")
    numbers: dict[str, Any]
    numbers = {key: whole(key, record[key]) for key in keys if record.get(key) is not None}
    content, prefix = _ids("content", record.get("content", [])), numbers.get("prefix_tokens", 0)
    if len(content) * CONTENT_TOKENS > max(0, row.input_tokens):
        raise ValueError(f"one whose content is {written(content)}")
    if not 0 <= prefix <= max(0, row.input_tokens):
        raise ValueError(f"one with prefix_tokens {prefix}")
    if not -1 <= numbers.get("session", -1) < MAX_SESSIONS:
        raise ValueError(f"one of session {numbers['session']}")
    return replace(row, content=content, **numbers)


def _ids(key: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise TypeError(f"one whose {key} are {written(value)}")
    return tuple(whole(key, number) for number in value)


def whole(key: str, value: object) -> int:
    """Return a whole number, also one written as a text, and nothing that only looks like one."""
    if type(value) is int:
        return value
    if isinstance(value, str) and value.strip().isdecimal():
        return int(value)
    number = float(value) if isinstance(value, str) else value
    if not isinstance(number, float) or not number.is_integer():
        raise TypeError(f"one whose {key} is {written(value)}, no whole number")
    return int(number)


def repeated(requests: Sequence[Request], parents: Mapping[Key, Key | None]) -> set[int]:
    """
    Return the positions of requests whose spans count none of their own.

    Of a span and one above it (*parents*) with the same tokens the upper one counts: it begins when
    the request arrived. A span above several, with the sum of their tokens, is no request.

    Raises InputError: tokens of a span are neither those of the one below nor the sum of several,
    two spans of one id have different ones, or two of a trace have the same and a span above one of
    them is not in the file.
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
        tokens = [requests[child].tokens for child in children]
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
