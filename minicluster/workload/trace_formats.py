"""Formats of traces by their keys, and what keys mean in any of them."""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection


class Format(NamedTuple):
    """
    A format.

    Attributes:
        keys: of its records, which no other format has.
        time_unit: of times that are numbers, by its documentation; `None`: it says none.
        block_tokens: tokens of the blocks of `hash_ids`; `None`: it has none.
        sure: its keys alone tell it from any other, so that its unit is certain.
        only_requests: every line is a request, in the order of arrival; else lines are sorted, and
            those without tokens (health checks, refused requests) left out.
    """

    title: str
    keys: frozenset[str] = frozenset()
    time_unit: str | None = None
    block_tokens: int | None = None
    sure: bool = False
    only_requests: bool = True


MOONCAKE = frozenset({"timestamp", "input_length", "output_length"})
FORMATS = {
    "schedule": Format("a schedule", frozenset({"due_s"}), "s"),
    # Azure/AzurePublicDataset, LLM traces of 2023 and 2024, multimodal trace of 2025.
    "azure": Format("an Azure trace", frozenset({"TIMESTAMP", "ContextTokens", "GeneratedTokens"})),
    # HPMLL/BurstGPT, releases 1 to 3.
    "burstgpt": Format(
        "BurstGPT",
        frozenset({"Timestamp", "Request tokens", "Response tokens"}),
        time_unit="s",
        sure=True,
    ),
    # alibaba-edu/qwen-bailian-usagetraces-anon, its README.
    "bailian": Format("Qwen-Bailian", MOONCAKE | {"chat_id", "parent_chat_id"}, "s", 16, sure=True),
    # kvcache-ai/Mooncake, FAST25 release; replayed by AIPerf and Dynamo, whose rows may wait.
    "mooncake": Format("Mooncake", MOONCAKE, "ms", 512),
    # microsoft/vidur, data/processed_traces.
    "vidur": Format(
        "Vidur",
        frozenset({"arrived_at", "num_prefill_tokens", "num_decode_tokens"}),
        time_unit="s",
        sure=True,
    ),
    "spans": Format("spans", frozenset({"startTimeUnixNano"}), only_requests=False),
    "log": Format("a log", only_requests=False),
}
"""Formats by name: the first one whose keys a record has is its own."""

TIMES = (
    "starttime", "start", "startedat", "arrivaltime", "arrivaltimestamp", "arrivedat", "arrival",
    "requestreceived", "receivedat", "requesttime", "requeststarttime", "requesttimestamp",
    "requestedat",
    "createdat", "createdtime", "created", "timestamp", "time", "ts", "datetime",
)  # fmt: skip
"""Names of the time of a request, the first one that a record has; the beginning before others."""

NAMES = {
    "prompt": {
        "prompttokens", "inputtokens", "contexttokens", "requesttokens", "tokensprompt",
        "inputlength", "inputlen", "promptlength", "promptlen", "prompttokencount",
        "inputtokencount", "numprompttokens", "numinputtokens", "numprefilltokens", "inputtoks",
        "promptsize", "nativetokensprompt", "usage.input", "usagedetails.input",
        "tokencount.prompt",
    },
    "answer": {
        "completiontokens", "outputtokens", "generatedtokens", "responsetokens", "tokenscompletion",
        "outputlength", "outputlen", "completionlength", "candidatestokencount",
        "outputtokencount", "completiontokencount", "generationtokens", "numgenerationtokens",
        "numcompletiontokens", "numoutputtokens", "numdecodetokens", "outputtoks", "tokensize",
        "nativetokenscompletion", "usage.output", "usagedetails.output", "tokencount.completion",
    },
    "images": {
        "numimages", "nimages", "imagecount", "images", "image", "imagetokens", "imageurls",
        "numaudio", "numaudios", "audiocount", "audios", "audio", "audiotokens",
        "numvideos", "videocount", "videos", "video", "videotokens",
        "nummediaprompt", "numinputaudioprompt",
    },
    "kind": {"type", "modality", "requesttype"},
    "waits": {
        "waitfor", "waitsfor", "dependson", "dependencies", "delay", "thinktime", "previous",
        "previousrequest", "parent", "parentid", "parentrequestid",
    },
    "sequences": {"n", "bestof", "numsequences"},
    "beside": {"cachereadinputtokens", "cachecreationinputtokens"},
    "ids": {"hashids"},
    "block": {"blocksize", "blocktokens", "traceblocksize"},
    "session": {"sessionid"},
    "trace": {"traceid"},
    "span": {"spanid"},
    "took": {"seconds"},
    "id": {"requestid"},
    "references": {"references"},
}  # fmt: skip
"""What a key means by its last name, or its last two, in lower case without signs."""
SURE_WAITS = {"waitfor", "waitsfor", "dependson", "dependencies"}
"""Keys of rows that wait for others, in logs too, whose other rows came when they say."""
PARENTS = {"parentspanid", "parentid"}
"""Keys of the span above."""
BESIDE = re.compile("cache|detail|cost|price|limit|max")
"""Tables whose counts are parts of others, or no tokens of this request."""
KINDS_OF_IMAGES = {"image", "images", "audio", "video", "vision", "multimodal"}
UNIT_SUFFIX = re.compile(
    r"(?:_(?P<snake>s|sec|seconds|ms|millis|us|ns|unix_nano)|(?P<camel>Ms|Us|Ns|UnixNano))$"
)
SUFFIX_UNITS = {"sec": "s", "seconds": "s", "millis": "ms", "unix_nano": "ns", "unixnano": "ns"}


class Meaning(NamedTuple):
    """What a key says: a name of `NAMES` or `time`; its rank among `TIMES`; the unit in it."""

    what: str
    name: str
    rank: int = 0
    unit: str | None = None


@cache
def meaning(path: str) -> Meaning | None:
    """Return what a dotted key means; `None`: nothing that is read."""
    *tables, last = path.split(".")
    suffix = UNIT_SUFFIX.search(last)
    unit = (suffix["snake"] or suffix["camel"].lower()) if suffix else None
    bare = _plain(last[: suffix.start()] if suffix else last)
    name = _plain(last)
    if bare in TIMES:
        return Meaning("time", bare, TIMES.index(bare), SUFFIX_UNITS.get(unit or "", unit))
    both = f"{_plain(tables[-1])}.{name}" if tables else name
    for what, names in NAMES.items():
        if name in names or both in names or (what == "waits" and bare in names):
            part_of_another = what in {"prompt", "answer"} and BESIDE.search(".".join(tables))
            return None if part_of_another else Meaning(what, bare if what == "waits" else name)
    return Meaning("parent", name) if name in PARENTS else None


def format_of(keys: Collection[str]) -> str:
    """Return the name of the format that has these keys; any other is a log."""
    return next(name for name, each in FORMATS.items() if each.keys <= set(keys))


def _plain(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower())
