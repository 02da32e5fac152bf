"""The requests of a trace's file as its lines have them, before their times have a unit."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from minicluster.errors import Fault, InputError, written
from minicluster.workload.arrivals import CONTENT_TOKENS
from minicluster.workload.records import flat, read_records
from minicluster.workload.spans import Key, repeated
from minicluster.workload.trace_formats import FORMATS, Format, Meaning, format_of, meaning
from minicluster.workload.trace_times import epoch_unit, number_of

if TYPE_CHECKING:
    from collections.abc import Iterable

KNOWN = "a log (JSON lines or CSV with time, prompt_tokens, output_tokens), or " + ", ".join(
    each.title for each in FORMATS.values() if each.keys
)
MEDIA = ("images", "kind")
"""Meanings of keys that may say so."""
IMAGE = re.compile(
    r"(?<![a-z])(image|audio|video|vision|multimodal)|^(input_)?file$|^document$", re.IGNORECASE
)
"""Types of requests, and of parts of them, that are no text."""
NO_IMAGE = re.compile(r"[\s0.]*|none|null|false|\[\]|[\w./-]+:[\w.-]+", re.IGNORECASE)
"""Texts under a key of images that are none: zero, and a container's name and tag."""
MAX_SESSIONS = 1 << 31
"""Bound of the numbers of conversations; a larger one is a mistake."""


class TraceRow(NamedTuple):
    """
    One request.

    Attributes:
        content: ids of the prompt's whole blocks.
        prefix_tokens: of the prompt, in the prefix cache.
        session: conversation; -1: none.
        adapter: LoRA adapter; -1: none.
    """

    due_s: float
    input_tokens: int
    output_tokens: int
    content: tuple[int, ...] = ()
    prefix_tokens: int = 0
    session: int = -1
    adapter: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadAs:
    """
    What a file was taken for.

    Attributes:
        form: format, unit of times and size of blocks.
        left_out: number of lines, spans and requests that count nowhere, by the reason.
        unread: keys that have no meaning here.
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


class Request(NamedTuple):
    """
    A request as its line has it.

    Attributes:
        place: file and line.
        row: all but its time, and the content that `ids` name.
        at: its time, a number or a text, under `key`, which may say its `unit`.
        took_s: from its arrival to `at`.
        ids: of the blocks of its prompt.
        span: its ids, if it is one.
    """

    place: str
    row: TraceRow
    at: object
    key: str
    unit: str | None = None
    took_s: float = 0.0
    ids: tuple[int, ...] = ()
    span: Key | None = None

    @property
    def tokens(self) -> tuple[int, int]:
        """Of prompt and answer."""
        return self.row.input_tokens, self.row.output_tokens


Facts = dict[str, list[tuple[str, Meaning, Any]]]
"""What a record says, by what its keys mean: each key, its meaning and its value."""


@dataclass(slots=True, kw_only=True)
class RequestFile:
    """
    A file of requests.

    Attributes:
        format: that of the first request's keys, if it is known.
        left_out: number of its lines, spans and requests that are none of `read`, by the reason.
        unread: keys of requests that have no meaning here.
    """

    path: Path
    skip_images: bool
    format: Format = FORMATS["log"]
    left_out: Counter[str] = field(default_factory=Counter)
    unread: dict[str, None] = field(default_factory=dict)
    known: bool = False

    def read(self) -> list[Request]:
        """
        Return the requests in the file's order, each once; at least one.

        Raises:
            InputError: no such file, no requests, or a record that cannot be one.
        """
        found: list[Request] = []
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
                request = self._request(place, record, facts)
                if request is not None and span is None:
                    _refuse_again(request, facts, lines)
            except InputError as error:
                raise error.inside(place) from None
            except (TypeError, ValueError, OverflowError, RecursionError) as error:
                expected = "a request with a time and whole numbers of tokens"
                raise InputError(place, Fault(f"is {error}"), expected) from None
            if request is not None:
                found.append(request._replace(span=span))
        if not found:
            named = f": its keys are {', '.join(keys[:12])}" if keys else ""
            raise InputError(f"{self.path}:1", Fault(f"is a trace without requests{named}"), KNOWN)
        again = repeated(found, parents)
        self.left_out["spans of requests that other spans are, too"] += len(again)
        return [each for at, each in enumerate(found) if at not in again]

    def _facts(self, record: dict[str, Any]) -> Facts:
        facts: Facts = defaultdict(list)
        for key, value in flat({key: _decoded(value) for key, value in record.items()}):
            means = meaning(key)
            if value is None or value == "":
                continue
            if means is not None:
                facts[means.what].append((key, means, value))
            elif "[]" not in key:
                self.unread[key] = None
        return facts

    def _request(self, place: str, record: dict[str, Any], facts: Facts) -> Request | None:
        """Return the request of a record; `None`: it is none, and counted."""
        is_request = "prompt" in facts and "answer" in facts
        if not self.known:
            self.format = format_of(record)
            self.known = is_request or self.format.only_requests
        made = self.format.only_requests
        if not is_request and not made:
            self.left_out["lines without token counts"] += 1
            return None
        for key in self.format.keys if made else ():
            if record.get(key) in {None, ""}:
                raise InputError(key, None, f"a value: {self.format.title} has it")
        if self.format is FORMATS["schedule"]:
            return _from_schedule(place, record)
        _refuse_several(facts, made=made)
        images = media((key, value) for what in MEDIA for key, _, value in facts[what])
        if images is not None and self.skip_images:
            self.left_out["requests with images, audio or video"] += 1
            return None
        if images is not None:
            expected = "none: lengths in tokens do not say what images, audio or video cost"
            raise InputError(*images, expected, "--skip-images leaves such requests out")
        took_s = record.get("seconds", 0) if self.format is FORMATS["access"] else 0
        return _plain_request(place, facts, took_s=float(took_s))


def media(pairs: Iterable[tuple[str, Any]]) -> tuple[str, Any] | None:
    """Return key and value of the first image, audio or video in what `flat` gives of a record."""
    for key, value in pairs:
        what, text = getattr(meaning(key), "what", None), isinstance(value, str)
        if what == "images" and (not NO_IMAGE.fullmatch(value) if text else value):
            return key, value
        if what == "kind" and text and IMAGE.search(value):
            return key, value
    return None


def _decoded(value: object) -> object:
    """Decode a list or an object that was written as a text, as in cells of CSV."""
    if isinstance(value, str) and value.startswith(("[{", '{"')):
        with suppress(ValueError):
            return json.loads(value)
    return value


def _refuse_again(request: Request, facts: Facts, lines: dict[tuple[object, ...], str]) -> None:
    """Refuse a second line of one id and prompt: of an answer in parts, or of two programs."""
    for key, _, value in facts["id"]:
        # A plain id may be of something else, unless its lines came at one time.
        at = None if "request" in key.lower() else str(request.at)
        before = lines.setdefault((str(value), request.row.input_tokens, at), request.place)
        if before != request.place:
            expected = f"another one than {before} has, with the same prompt"
            raise InputError(key, value, expected, "keep one line of each request")


def _refuse_several(facts: Facts, *, made: bool) -> None:
    """Refuse what is no request by itself, and tokens that are not all of it."""
    waits = facts["waits"] + (facts["turns"] if made or facts["session"] else [])
    for key, _, value in waits + (facts["parent"] if made else []):
        if value not in ([], -1, "-1"):
            expected = "none: when a request comes that waits for another, no trace can say"
            way_out = "give only rows that wait for none, with the times of their arrivals"
            raise InputError(key, value, expected, way_out)
    for key, _, value in facts["several"]:
        if str(len(value) if isinstance(value, list) else value) not in {"1", "1.0"}:
            expected = "1: of several answers, or requests, in one row this gives no lengths"
            raise InputError(key, value, expected)
    whole_prompt = any("prompt" in key for key, _, _ in facts["prompt"])
    for key, _, value in facts["beside"] + ([] if whole_prompt else facts["beside_input"]):
        if str(value) not in {"0", "0.0"}:
            expected = "none: other counts of the row may contain these tokens or not"
            way_out = "write the sums as prompt_tokens and completion_tokens"
            raise InputError(key, value, expected, way_out)


def _plain_request(place: str, facts: Facts, *, took_s: float) -> Request:
    if not facts["time"]:
        raise ValueError("a request without a time")
    key, means, at = min(facts["time"], key=_doubt)
    ids = facts["blocks"][0][2] if facts["blocks"] else []
    if not isinstance(ids, list):
        raise TypeError(f"one whose hash_ids are {written(ids)}")
    return Request(
        place=place,
        row=TraceRow(0.0, _tokens(facts, "prompt"), _tokens(facts, "answer")),
        at=at,
        key=key,
        unit=means.unit,
        took_s=took_s,
        ids=tuple(whole("hash_ids", each) for each in ids),
    )


def _doubt(time: tuple[str, Meaning, Any]) -> tuple[bool, int, int]:
    """Order the times of a record: dates and those with a unit before others, which may be long."""
    key, means, at = time
    number = number_of(at)
    is_count = number is not None and means.unit is None and epoch_unit(number) is None
    return is_count, key.count("."), means.rank


def _tokens(facts: Facts, what: str) -> int:
    values = {whole(key, value): key for key, _, value in facts[what]}
    if len(values) > 1:
        (one, key), (other, other_key), *_ = values.items()
        raise InputError(key, one, f"what {other_key} says, which is {other}")
    return next(iter(values))


def _span_ids(facts: Facts) -> tuple[Key | None, Key | None]:
    """Return the ids of a span and of the one above it."""
    own = facts["span"] or facts["id"]
    if not facts["trace"] or not own:
        return None, None
    trace = str(facts["trace"][0][2])
    # Datadog and others write zeros where there is none above.
    above = [str(value) for _, _, value in facts["parent"] if str(value).strip("0")]
    return (trace, str(own[0][2])), (trace, above[0]) if above else None


def _from_schedule(place: str, record: dict[str, Any]) -> Request:
    if record.get("previous") is not None:
        expected = "null: when a request comes that waits for an answer, no schedule can say"
        way_out = "draw the requests anew: --users or --turns, and --seed, in place of the file"
        raise InputError("previous", record["previous"], expected, way_out)
    prompt, answer = (whole(key, record.get(key)) for key in ("input_tokens", "output_tokens"))
    ids = record.get("content", [])
    if not isinstance(ids, list) or len(ids) * CONTENT_TOKENS > max(0, prompt):
        raise TypeError(f"one whose content is {written(ids)}")
    prefix = whole("prefix_tokens", record.get("prefix_tokens", 0))
    session, adapter = (
        -1 if record.get(key) is None else whole(key, record[key]) for key in ("session", "adapter")
    )
    if not 0 <= prefix <= max(0, prompt) or not -1 <= session < MAX_SESSIONS:
        raise ValueError(f"one with prefix_tokens {prefix} and session {session}")
    content = tuple(whole("content", each) for each in ids)
    row = TraceRow(0.0, prompt, answer, content, prefix, session, adapter)
    return Request(place, row, record["due_s"], "due_s", "s")


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
