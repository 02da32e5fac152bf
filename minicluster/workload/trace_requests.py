"""The requests of a trace's file as its lines have them, before their times have a unit."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from minicluster.errors import Fault, InputError, written
from minicluster.workload.arrivals import CONTENT_TOKENS
from minicluster.workload.records import flat, read_records, unnested
from minicluster.workload.spans import Key, Span, repeated
from minicluster.workload.trace_formats import (
    FORMATS,
    Format,
    Meaning,
    format_of,
    meaning,
)
from minicluster.workload.trace_options import TraceReading

if TYPE_CHECKING:
    from collections.abc import Iterator

KNOWN = ", ".join(
    f"{each.title} ({', '.join(each.keys)})" for each in FORMATS.values() if each.keys
)
KNOWN += ", or a log (JSON lines or CSV with time, prompt_tokens, output_tokens)"
IMAGES = {"image", "images", "audio", "video", "vision", "multimodal"}
"""Types of requests that are no text."""
PLAIN = {"time", "prompt", "answer", "took", "ids", "block", "id"}
"""What a request says that is no reason to refuse it."""
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
        ids: of the blocks of its prompt, of `block_tokens` each if the line says so.
    """

    place: str
    row: TraceRow
    at: object
    key: str
    unit: str | None = None
    took_s: float = 0.0
    ids: tuple[int, ...] = ()
    block_tokens: int | None = None


Facts = dict[str, list[tuple[str, Meaning, Any]]]
"""What a record says, by what its keys mean: each key, its meaning and its value."""


@dataclass(slots=True, kw_only=True)
class RequestFile:
    """
    A file of requests.

    Attributes:
        format: as the options say, or as the keys of the first request do.
        left_out: number of its lines, spans and requests that are none of `read`, by the reason.
        unread: keys of requests that have no meaning here.
        keys: of the first record.
    """

    path: Path
    reading: TraceReading
    format: Format = FORMATS["log"]
    left_out: Counter[str] = field(default_factory=Counter)
    unread: dict[str, None] = field(default_factory=dict)
    keys: tuple[str, ...] = ()

    def read(self) -> list[Request]:
        """
        Return the requests in the file's order, each once.

        Raises:
            InputError: no such file, no records, or a record that cannot be a request.
        """
        found: list[Request] = []
        spans: dict[int, Span] = {}
        parents: dict[Key, Key | None] = {}
        lines: dict[tuple[str, int, int], str] = {}
        known = False
        for place, record in self._records():
            facts = self._facts(record)
            is_request = "prompt" in facts and "answer" in facts
            if not known:
                self.keys = self.keys or tuple(record)
                self.format = FORMATS[self.reading.format or format_of(record)]
                known = is_request or self.format.only_requests
            request = self._read(place, record, facts, is_request=is_request)
            ids = _span_ids(facts)
            if ids is not None:
                parents[ids[0]] = ids[1]
            if request is not None:
                tokens = request.row.input_tokens, request.row.output_tokens
                if ids is not None:
                    end = facts["end"][0][2] if facts["end"] else None
                    spans[len(found)] = Span(place, ids[0], tokens, (request.at, end))
                elif facts["id"]:
                    key, _, value = facts["id"][0]
                    before = lines.setdefault((str(value), *tokens), place)
                    if before != place:
                        raise InputError(
                            f"{place}: {key}",
                            value,
                            f"another one than {before} has, with the same tokens",
                            "keep one line of each request",
                        )
                found.append(request)
        positions = list(spans)
        again = {positions[at] for at in repeated(list(spans.values()), parents)}
        self.left_out += Counter({"spans of requests that other spans are, too": len(again)})
        return [each for at, each in enumerate(found) if at not in again]

    def _records(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for number, document in read_records(self.path, KNOWN):
            place = f"{self.path}:{number}"
            try:
                for record in unnested(document):
                    yield place, flat(record)
            except (TypeError, AttributeError, RecursionError):
                raise InputError(place, str(document)[:80], KNOWN) from None

    def _facts(self, record: dict[str, Any]) -> Facts:
        facts: Facts = defaultdict(list)
        for key, value in record.items():
            means = meaning(key)
            if value is None or value == "":
                continue
            if means is None or means.what in {"session", "end"}:
                self.unread[key] = None
            if means is not None:
                facts[means.what].append((key, means, value))
        return facts

    def _read(
        self, place: str, record: dict[str, Any], facts: Facts, *, is_request: bool
    ) -> Request | None:
        """Return the request of a record; `None`: it is none, and counted."""
        if not is_request and not self.format.only_requests:
            self.left_out["lines without token counts"] += 1
            return None
        try:
            if self.format is FORMATS["schedule"]:
                return _from_schedule(place, record)
            self._refuse_missing(record)
            if facts.keys() <= PLAIN:
                return _request(place, facts)
            self._refuse_waiting(facts)
            _refuse_several(facts)
            if not self._is_left_out(facts):
                return _request(place, facts)
        except InputError as error:
            raise error.inside(place) from None
        except (TypeError, ValueError, OverflowError) as error:
            expected = "a request with a time and whole numbers of tokens"
            raise InputError(place, Fault(f"is {error}"), expected) from None
        self.left_out["requests with images, audio or video"] += 1
        return None

    def _is_left_out(self, facts: Facts) -> bool:
        """Say whether a request has images, audio or video; refuse it unless asked to."""
        images = _with_images(facts)
        if images is not None and not self.reading.skip_images:
            expected = "none: lengths in tokens do not say what images, audio or video cost"
            raise InputError(*images, expected, "--skip-images leaves such requests out")
        return images is not None

    def _refuse_missing(self, record: dict[str, Any]) -> None:
        if self.format.only_requests:
            for key in sorted(self.format.keys):
                if record.get(key) in {None, ""}:
                    raise InputError(key, None, f"a value: {self.format.title} has it")

    def _refuse_waiting(self, facts: Facts) -> None:
        """Refuse a row that waits for another; in a log only keys that can mean nothing else."""
        made = self.format.only_requests
        turns = facts["turns"] if made or "session" in facts else []
        for key, _, value in (*facts["waits"], *turns, *(facts["parent"] if made else [])):
            if value not in ([], -1, "-1"):
                expected = "none: when a request comes that waits for another, no trace can say"
                way_out = "give only rows that wait for none, with the times of their arrivals"
                raise InputError(key, value, expected, way_out)


def _refuse_several(facts: Facts) -> None:
    """Refuse counts of tokens of several answers, and of a part of a prompt."""
    for key, _, value in facts["sequences"]:
        if str(value) != "1":
            expected = "1: of several answers to one prompt, this gives no lengths"
            raise InputError(key, value, expected)
    if not any("prompt" in key for key, _, _ in facts["prompt"]):
        for key, _, value in facts["beside"]:
            if value:
                expected = "none beside input_tokens, which may contain them or not"
                raise InputError(key, value, expected, "write the sum as prompt_tokens")


def _request(place: str, facts: Facts) -> Request:
    """Read a request; its time is the answer's end where it says `seconds`."""
    if not facts["time"]:
        raise ValueError("a request without a time")
    key, means, at = min(facts["time"], key=lambda each: (each[0].count("."), each[1].rank))
    prompt, answer = _tokens(facts, "prompt"), _tokens(facts, "answer")
    took_s = float(facts["took"][0][2]) if facts["took"] else 0.0
    ids = facts["ids"][0][2] if facts["ids"] else []
    if not isinstance(ids, list):
        raise TypeError(f"one whose hash_ids are {written(ids)}")
    return Request(
        place=place,
        row=TraceRow(0.0, prompt, answer),
        at=at,
        key=key,
        unit=means.unit,
        took_s=took_s,
        ids=tuple(whole("hash_ids", each) for each in ids),
        block_tokens=whole("block_size", facts["block"][0][2]) if facts["block"] else None,
    )


def _tokens(facts: Facts, what: str) -> int:
    if len(facts[what]) == 1:
        key, _, value = facts[what][0]
        return whole(key, value)
    values = {whole(key, value): key for key, _, value in facts[what]}
    if len(values) > 1:
        (one, key), (other, other_key), *_ = values.items()
        raise InputError(key, one, f"what {other_key} says, which is {other}")
    return next(iter(values))


def _with_images(facts: Facts) -> tuple[str, Any] | None:
    """Return key and value of what is no text in a request."""
    for key, _, value in facts["images"]:
        is_some = bool(value) if not isinstance(value, str) else value.strip("0. ").isdigit()
        if is_some:
            return key, value
    kinds = ((key, value) for key, _, value in facts["kind"] if isinstance(value, str))
    return next((pair for pair in kinds if pair[1].lower() in IMAGES), None)


def _span_ids(facts: Facts) -> tuple[Key, Key | None] | None:
    """Return the ids of a span and of the one above it."""
    if not facts["trace"] or not facts["span"]:
        return None
    trace, span = str(facts["trace"][0][2]), str(facts["span"][0][2])
    above = [value for _, _, value in facts["parent"]]
    above += [each["spanID"] for _, _, value in facts["references"] for each in value]
    return (trace, span), (trace, str(above[0])) if above else None


def _from_schedule(place: str, record: dict[str, Any]) -> Request:
    input_tokens, output_tokens = (
        whole(key, record.get(key)) for key in ("input_tokens", "output_tokens")
    )
    if record.get("previous") is not None:
        expected = "null: when a request comes that waits for an answer, no schedule can say"
        way_out = "draw the requests anew: --users or --turns, and --seed, in place of the file"
        raise InputError("previous", record["previous"], expected, way_out)
    ids = record.get("content", [])
    if not isinstance(ids, list) or len(ids) * CONTENT_TOKENS > max(0, input_tokens):
        raise TypeError(f"one whose content is {written(ids)}")
    prefix = whole("prefix_tokens", record.get("prefix_tokens", 0))
    session, adapter = (
        -1 if record.get(key) is None else whole(key, record[key]) for key in ("session", "adapter")
    )
    if not 0 <= prefix <= max(0, input_tokens) or not -1 <= session < MAX_SESSIONS:
        raise ValueError(f"one with prefix_tokens {prefix} and session {session}")
    content = tuple(whole("content", each) for each in ids)
    row = TraceRow(0.0, input_tokens, output_tokens, content, prefix, session, adapter)
    return Request(place, row, record["due_s"], "due_s", "s")


def whole(key: str, value: object) -> int:
    """Return a whole number, also one written as a text, and nothing that only looks like one."""
    if type(value) is int:
        return value
    number = float(value) if isinstance(value, str) else value
    if isinstance(number, float) and number.is_integer():
        number = int(value) if isinstance(value, str) and value.isdigit() else int(number)
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(f"one whose {key} is {written(value)}, no whole number")
    return number
