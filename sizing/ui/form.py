"""What is asked on the page: the fields of a scenario as text, in an address and in errors."""

from __future__ import annotations

import base64
import binascii
import json
import re
import zlib
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from minicluster.config import toml_value
from minicluster.errors import Fault, InputError, written, wrong_kind
from minicluster.routing import POLICIES
from minicluster.specs.model import DTYPE_BYTES
from minicluster.specs.scenario import CATALOG, YOURS
from minicluster.specs.slo import PERCENTILES
from minicluster.specs.workload import Lengths
from sizing import catalog
from sizing.catalog.huggingface.reader import model_from
from sizing.catalog.schema import scenario_keys
from sizing.scenario import Scenario, value_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from minicluster.specs.cluster import ClusterSpec

FIRST = "llama-3.1-8b-h100"
"""Scenario that the page begins with."""
MOST_CASES = 4
"""Scenarios of an address: the one that is answered, and those kept beside it."""
DROPPED = "dropped:"
"""Begins the model of a `config.json` that was dropped in; its key in `Case.configs` follows."""
MODEL = "model.id"
PRESET = "cluster.preset"
CLASSES = "workload.classes"
"""Field that is not drawn: how many classes of requests there are; empty: the load has none."""
MOST_CLASSES = 6
RUNNING, TRAFFIC = "What I run today", "Users, or traffic from a log"
MODEL_FILE = "A model that is not listed"
"""Groups that a file fills."""
TODAY = {"mixed": "Mixed pool", "prefill": "Prefill pool", "decode": "Decode pool"}
"""Labels of the pools that run today, by role; their keys are `today.ROLE`, of no scenario."""
NOTES = {RUNNING: "today.notes", TRAFFIC: "workload.notes"}
"""Fields that are not drawn, by group: what a file said, a sentence a line."""
MOST_BYTES = 100_000
"""Largest `config.json` that is taken; the longest of the catalog has a tenth of that."""


@dataclass(frozen=True, slots=True)
class Field:
    """
    One field.

    Attributes:
        key: dotted key of the scenario file.
        label: words above the field.
        choices: values to choose from; empty: any text. The first may be "": the default.
    """

    key: str
    label: str
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FieldGroup:
    """Fields under one heading; those of an expert are folded away."""

    title: str
    fields: tuple[Field, ...]
    folded: bool = False


PLAIN_LOAD = {
    "requests_per_s": "Requests/s",
    "prefix_tokens": "Cached tokens",
    "input_tokens": "Prompt tokens",
    "output_tokens": "Answer tokens",
}
FROM_USERS = {
    "users": "Users, if no rate",
    "think_s": "Think time, seconds",
    "lengths": "Lengths from a log",
}
LOAD = PLAIN_LOAD | FROM_USERS
"""Labels of the load's fields, which each class of requests has as well."""
LIMITS = {
    "slo.ttft_s": "TTFT, seconds",
    "slo.tpot_s": "TPOT, seconds",
    "slo.itl_s": "ITL, seconds",
    "slo.e2e_s": "E2E, seconds",
}
LABELS: dict[str, dict[str, str]] = {
    "Cluster and budgets": {
        PRESET: "Cluster and fabric",
        "cluster.gpus_per_node": "GPUs per node",
        "cluster.price_usd_per_gpu_hour": "$ per GPU and hour",
        "cost.prices": "Prices",
        "cost.max_usd_per_hour": "$ per hour at most",
        "cost.max_power_w": "Watts at most",
    },
    "Engine and search": {
        "engine.name": "Engine",
        "engine.version": "Engine version",
        "model.weight_dtype": "Weights",
        "model.kv_dtype": "KV cache",
        "engine.max_num_seqs": "Sequences at most",
        "engine.max_num_batched_tokens": "Tokens per step",
        "engine.gpu_memory_utilization": "GPU memory share",
        "search.pools": "Pools",
        "search.confidence_fraction": "Confidence",
        "search.spare_replicas": "Spare replicas",
        "model.max_context_tokens": "Context at most",
        "model.assumed_context_tokens": "Context assumed",
        "engine.block_size": "Tokens per KV block",
        "engine.chunked_prefill_tokens": "Prompt chunk",
    },
    "Routing, caches, drafts and adapters": {
        "search.routing": "Routing",
        "search.local_threshold_tokens": "Local prompts up to",
        "engine.kv_offload_host_bytes": "KV offload, bytes",
        "engine.kv_offload_disk_bytes": "… on disk, bytes",
        "engine.kv_offload_disk_bytes_per_s": "Disk, bytes/s",
        "engine.kv_offload_disk_path": "Disk path",
        "engine.speculative_tokens": "Drafts a step",
        "engine.mean_accepted_tokens": "Drafts accepted",
        "workload.lora_adapters": "LoRA adapters",
        "workload.lora_popularity_exponent": "Popularity exponent",
        "engine.max_loras": "Adapters a batch",
        "engine.max_lora_rank": "Adapter rank",
        "engine.max_cpu_loras": "Adapters in memory",
        "engine.lora_target_modules": "Adapted modules",
    },
    "Experts of an MoE model": {
        "engine.redundant_experts": "Copies of experts",
        "engine.all_to_all": "All to all",
        "engine.two_batch_overlap": "Two-batch overlap",
    },
}
"""Groups of fields, and labels by key; other keys of the schema are in `OTHERS`, by their names."""
GPUS = {"cluster.gpu": "GPU", "cluster.max_gpus": "GPUs at most"}
OTHERS = "Other settings"
POOL = re.compile(r"--(mixed|prefill|decode) (\d+x\S+)")
"""A pool as an option of `sizing predict`."""
QUOTED = "\N{LEFT DOUBLE QUOTATION MARK}{}\N{RIGHT DOUBLE QUOTATION MARK}"
LEFT_OUT = ("workload.trace", CLASSES)
"""Keys without a field of their own: a trace is a file of the server."""


@cache
def _choices(key: str) -> tuple[str, ...]:
    """Return the values to choose from; empty: any text."""
    gpus = (name for name, entry in catalog.gpus().items() if entry.spec.kind != "cpu")
    known = {
        MODEL: tuple(catalog.models()),
        "engine.name": tuple(dict.fromkeys(engine.name for engine in catalog.engines())),
        "slo.percentile": PERCENTILES[1:],
        PRESET: tuple(presets()),
        "cluster.gpu": tuple(gpus),
        "cost.prices": (YOURS, CATALOG),
        "model.weight_dtype": ("", *DTYPE_BYTES),
        "model.kv_dtype": ("", *DTYPE_BYTES),
        "search.pools": ("any", "split", "mixed"),
        "search.routing": tuple(POLICIES),
        "engine.all_to_all": ("", "deepep"),
    }
    booleans = {schema.key for schema in scenario_keys() if schema.type == "boolean"}
    return known.get(key, ("", "true", "false") if key in booleans else ())


@cache
def groups(classes: int = 0) -> tuple[FieldGroup, ...]:
    """Return all fields for a load of so many *classes*, in the order of the page."""
    today = {f"today.{role}": label for role, label in TODAY.items()}
    limits = {**LIMITS, "slo.percentile": "Percentile"}
    labels: dict[str, dict[str, str]] = {"Model": {MODEL: "Model"}}
    if not classes:
        labels["Load"] = {f"workload.{key}": label for key, label in PLAIN_LOAD.items()}
    for at in range(classes):
        own = {"name": "Name", **LOAD, **LIMITS}
        labels[f"Requests of class {at + 1}"] = {
            f"{CLASSES}.{at}.{key}": label for key, label in own.items()
        }
    labels["Latency limits of every class" if classes else "Latency limits"] = limits
    labels |= {"GPUs": GPUS, MODEL_FILE: {}, RUNNING: today}
    if not classes:
        labels[TRAFFIC] = {f"workload.{key}": label for key, label in FROM_USERS.items()}
    labels |= LABELS
    labelled = {key for labels_of in (*labels.values(), limits) for key in labels_of}
    labels[OTHERS] = {
        schema.key: schema.key.partition(".")[2].replace("_", " ").capitalize()
        for schema in scenario_keys()
        if schema.key not in labelled
        and schema.key.count(".") == 1
        and not schema.type.startswith("table")
        and schema.key not in LEFT_OUT
        and schema.key not in {f"workload.{key}" for key in LOAD}
    }
    shown = {"Model", "Load", "GPUs", "Latency limits", "Latency limits of every class"}
    return tuple(
        FieldGroup(
            title,
            tuple(Field(key, label, _choices(key)) for key, label in labels_of.items()),
            folded=title not in shown and not title.startswith("Requests of class"),
        )
        for title, labels_of in labels.items()
    )


@cache
def presets() -> Mapping[str, ClusterSpec]:
    """Return the clusters of GPUs by name."""
    gpus = {name for name, entry in catalog.gpus().items() if entry.spec.kind != "cpu"}
    return {name: each for name, each in catalog.clusters().items() if each.gpu in gpus}


def fields(classes: int = 0) -> Iterator[Field]:
    """Yield every field for a load of so many *classes*."""
    for group in groups(classes):
        yield from group.fields


def keys_of(classes: int = 0) -> list[str]:
    """Return the keys of all texts for a load of so many *classes*, drawn or not."""
    return [CLASSES, *NOTES.values(), *(each.key for each in fields(classes))]


@cache
def bases() -> tuple[str, ...]:
    """Return the shipped scenarios that need nothing of this machine."""
    known = {name: catalog.read_scenario(name) for name in catalog.files("scenarios")}
    return tuple(name for name, each in known.items() if each.model.id in catalog.models())


def help_text(key: str) -> str:
    """Return what the schema says of a field: meaning, unit, limits."""
    return _help_texts()[re.sub(r"\.\d+\.", ".", key)]


@cache
def _help_texts() -> dict[str, str]:
    texts = dict.fromkeys(
        (f"today.{role}" for role in TODAY),
        "Replicas and the slicing of each, such as 2xTP4: predicted beside the plan",
    )
    for key in scenario_keys():
        parts = [key.meaning, key.unit and f"Unit: {key.unit}."]
        if key.minimum is not None:
            parts.append(f"From {key.minimum:,} to {key.maximum:,}.")
        texts[key.key] = " ".join(filter(None, [*parts, f"Key: `{key.key}`"]))
    return texts


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """
    One scenario of the page.

    Attributes:
        base: the shipped scenario that it starts from.
        changes: what was typed in place of what *base* says, by key; empty text: no value.
        config: a `config.json` that was dropped in, as JSON; empty: none.
    """

    base: str = FIRST
    changes: tuple[tuple[str, str], ...] = ()
    config: str = ""

    def scenario(self) -> Scenario:
        """
        Return the scenario that was typed.

        Raises:
            InputError: the first value that cannot be used.
        """
        defaults = {key.key: key.default for key in scenario_keys()}
        needed = {key for key, value in defaults.items() if value is not None and value != ()}
        typed: dict[str, object] = {}
        if any(key.startswith(CLASSES) for key, _ in self.changes):
            typed["workload"] = _workload(self.texts())
        texts = self.texts()
        if not texts[CLASSES] and texts["workload.users"] and texts["workload.requests_per_s"]:
            expected = "nothing beside a rate"
            raise InputError(
                "workload.users", texts["workload.users"], expected, "empty Requests/s"
            )
        for key, text in self.changes:
            if key.startswith((CLASSES, "today.", *NOTES.values())):
                continue
            typed[key] = _value_of(text)
            if key in needed and not text.strip():
                raise InputError(key, None, "a value")
        if self.config:
            typed[MODEL] = str(config_folder(self.config))
        return Scenario.load(self.base, typed)

    def texts(self) -> dict[str, str]:
        """Return the text of every field: what was typed, else what *base* says."""
        texts = {**base_texts(self.base), **dict(self.changes)}
        if self.config:
            texts[MODEL] = DROPPED + config_name(self.config)
        return {key: texts.get(key, "") for key in keys_of(class_count(texts))}

    @property
    def today(self) -> dict[str, str]:
        """Pools that run today, by role, as `sizing predict` takes them."""
        texts = dict(self.changes)
        found = {role: texts.get(f"today.{role}", "").strip() for role in TODAY}
        return {role: text for role, text in found.items() if text}

    @classmethod
    def typed(cls, base: str, texts: Mapping[str, str], config: str) -> Case:
        """Return the case of fields with these texts."""
        stands = base_texts(base)
        changes = {key: text for key, text in texts.items() if text.strip() != stands.get(key, "")}
        dropped = changes.get(MODEL, "").startswith(DROPPED)
        if dropped:
            del changes[MODEL]
        return cls(base=base, changes=tuple(changes.items()), config=config if dropped else "")

    def query(self, number: int) -> dict[str, str]:
        """Return the case as parameters of an address; the first case has no number there."""
        prefix = f"{number}." if number > 1 else ""
        found = {"scenario": self.base, **dict(self.changes)}
        if self.config:
            packed = zlib.compress(self.config.encode(), 9)
            found["config"] = base64.urlsafe_b64encode(packed).decode().rstrip("=")
        return {prefix + key: text for key, text in found.items()}


def cases_of(query: Mapping[str, str]) -> list[Case]:
    """
    Return the cases of an address; parameters that are none of ours are left alone.

    Raises:
        InputError: a scenario that is not shipped, or a model that cannot be unpacked.
    """
    cases = []
    for number in range(1, MOST_CASES + 1):
        prefix = f"{number}." if number > 1 else ""
        if f"{prefix}scenario" not in query:
            break
        base = query[f"{prefix}scenario"]
        if base not in bases():
            raise InputError("scenario", base, f"one of {', '.join(bases())}")
        classes = query.get(prefix + CLASSES, base_texts(base)[CLASSES])
        known = keys_of(class_count({CLASSES: classes}))
        changes = tuple((key, query[prefix + key]) for key in known if prefix + key in query)
        config = _unpacked(query[f"{prefix}config"]) if f"{prefix}config" in query else ""
        cases.append(Case(base=base, changes=changes, config=config))
    return cases


def _unpacked(packed: str) -> str:
    try:
        unpacker = zlib.decompressobj()
        raw = base64.urlsafe_b64decode(packed + "=" * (-len(packed) % 4))
        return checked_config(unpacker.decompress(raw, MOST_BYTES + 1))
    except (binascii.Error, zlib.error):
        raise InputError("config", packed[:20], "a packed config.json") from None


def checked_config(content: bytes, place: str = "config.json") -> str:
    """
    Return a `config.json` as short JSON.

    Args:
        place: its name, for errors.

    Raises:
        InputError: no JSON, or no model that can be sized.
    """
    if len(content) > MOST_BYTES:
        raise InputError(place, f"{len(content):,} bytes", f"at most {MOST_BYTES:,}")
    try:
        raw = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise InputError(
            place, Fault(f"is not JSON: {error}"), "the config.json of a model"
        ) from None
    if not isinstance(raw, dict):
        raise InputError(place, wrong_kind(raw), "an object with the keys of a model")
    text = json.dumps(raw, separators=(",", ":"), sort_keys=True)
    model_from(raw, name=config_name(text), source=place, place=place)
    return text


def config_name(config: str) -> str:
    """Return the name of a dropped model: its type, and a hash that tells it from others."""
    kind = json.loads(config).get("model_type")
    known = kind if isinstance(kind, str) and kind.replace("_", "").isalnum() else "model"
    return f"{known}-{sha256(config.encode()).hexdigest()[:8]}"


@cache
def _dropped() -> TemporaryDirectory[str]:
    """Return the folder of everything that was dropped in; it goes when the server ends."""
    return TemporaryDirectory(prefix="sizing-ui-")


def config_folder(config: str) -> Path:
    """Write a dropped `config.json` where scenarios find it, and return its folder."""
    folder = Path(_dropped().name) / config_name(config)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(config, encoding="utf-8")
    return folder


@cache
def base_texts(base: str) -> Mapping[str, str]:
    """Return what a shipped scenario says in each field."""
    asked = Scenario.load(base)
    resolved = {
        "cluster.gpu": asked.gpu.name,
        "cluster.gpus_per_node": asked.cluster.gpus_per_node,
        "cluster.max_gpus": asked.cluster.max_gpus,
    }
    classes = len(asked.scenario.workload.classes)
    texts = dict.fromkeys(keys_of(classes), "") | {CLASSES: f"{classes or ''}"}
    for each in fields(classes):
        if not each.key.startswith("today."):
            texts[each.key] = plain(resolved.get(each.key, value_of(asked.scenario, each.key)))
    for each in fields(classes):  # a rate that follows from users is no text of the user's
        if each.key.endswith(".users") and texts[each.key]:
            texts[each.key.replace(".users", ".requests_per_s")] = ""
    return MappingProxyType(texts)


def preset_texts(name: str) -> dict[str, str]:
    """Return what the fields say of a cluster: its GPU, and how many are on a node."""
    found = presets()[name]
    return {
        PRESET: name,
        "cluster.gpu": found.gpu,
        "cluster.gpus_per_node": str(found.gpus_per_node),
    }


def with_cluster(texts: Mapping[str, str], stood: Mapping[str, str]) -> dict[str, str]:
    """Return texts with what a newly chosen cluster has in place of what *stood* before it."""
    if texts[PRESET] == stood[PRESET] or texts[PRESET] not in presets():
        return dict(texts)
    own = preset_texts(texts[PRESET]).items()
    return {**texts, **{key: text for key, text in own if texts[key] == stood[key]}}


def plain(value: object) -> str:
    """Write a value as its field takes it; nothing for no value."""
    if isinstance(value, Lengths):
        return lengths_text(value)
    if isinstance(value, bool | list | tuple):
        return json.dumps(value) if value != () else ""
    if value is None:
        return ""
    return f"{value:g}" if isinstance(value, float) else str(value)


# --- classes of requests


def class_count(texts: Mapping[str, str]) -> int:
    """
    Return how many classes of requests fields with these texts have.

    Raises:
        InputError: no number, or too many; an address may say anything.
    """
    text = texts[CLASSES]
    if text not in {"", *map(str, range(1, MOST_CLASSES + 1))}:
        raise InputError(CLASSES, text, f"a number from 1 to {MOST_CLASSES}, or nothing")
    return int(text or 0)


def with_class(texts: Mapping[str, str]) -> dict[str, str]:
    """Return texts with one class more: a copy of the last; of a load without any it makes two."""
    count = class_count(texts)
    found = dict(texts)
    if not count:
        found |= {f"{CLASSES}.0.{key}": texts[f"workload.{key}"] for key in LOAD}
        found |= {f"{CLASSES}.0.{key}": "" for key in LIMITS}
        found[f"{CLASSES}.0.name"] = "class-1"
        count = 1
    names = {found[f"{CLASSES}.{at}.name"] for at in range(count)}
    last, new = f"{CLASSES}.{count - 1}.", f"{CLASSES}.{count}."
    found |= {new + key.removeprefix(last): found[key] for key in [*found] if key.startswith(last)}
    found[f"{new}name"] = next(
        name for at in range(count + 1, 2 * count + 2) if (name := f"class-{at}") not in names
    )
    return found | {CLASSES: str(count + 1)}


def without_class(texts: Mapping[str, str], removed: int) -> dict[str, str]:
    """Return texts without one class; the load of the last but one is that of all requests."""
    kept = [at for at in range(class_count(texts)) if at != removed]
    rest = {key: text for key, text in texts.items() if not key.startswith(CLASSES)}
    if len(kept) == 1:
        own = f"{CLASSES}.{kept[0]}."
        load = {f"workload.{key}": texts[own + key] for key in LOAD}
        limits = {key: texts[own + key] or texts[key] for key in LIMITS}
        return {**rest, **load, **limits, CLASSES: ""}
    for new, old in enumerate(kept):
        for key in ("name", *LOAD, *LIMITS):
            rest[f"{CLASSES}.{new}.{key}"] = texts[f"{CLASSES}.{old}.{key}"]
    return rest | {CLASSES: str(len(kept))}


def _workload(texts: Mapping[str, str]) -> dict[str, object]:
    """Return the table of a load of classes; without any it is empty, for other keys to fill."""
    classes = []
    for at in range(class_count(texts)):
        own: dict[str, Any] = {"name": texts[f"{CLASSES}.{at}.name"].strip(), "slo": {}}
        for key in (*LOAD, *LIMITS):
            value = _value_of(texts[f"{CLASSES}.{at}.{key}"])
            if value is not None:
                table, name = (own["slo"], key[4:]) if key in LIMITS else (own, key)
                table[name] = value
        classes.append(own)
    return {"classes": classes} if classes else {}


def _value_of(text: str) -> object:
    return toml_value(text.strip()) if text.strip() else None


def lengths_text(lengths: Lengths) -> str:
    """Write lengths as the field takes them: a number, or a table of TOML."""
    if lengths.distribution == "fixed":
        return str(lengths.mean)
    names = ("low", "high", "median", "sigma")
    given = {name: getattr(lengths, name) for name in names if getattr(lengths, name) is not None}
    parts = [f"distribution = {json.dumps(lengths.distribution)}"]
    parts += [f"{name} = {plain(value)}" for name, value in given.items()]
    return f"{{ {', '.join(parts)} }}"


def field_of(error: InputError, texts: Mapping[str, str]) -> str:
    """Return the key of the field, of those with *texts*, that an error is about; empty: none."""
    place = error.place
    for at in range(class_count(texts)):
        name = texts[f"{CLASSES}.{at}.name"].strip()
        place = place.replace(f"{CLASSES}[{name}]", f"{CLASSES}.{at}")
    keys = sorted(texts.keys() - {CLASSES, *NOTES.values()}, key=len, reverse=True)
    parts = place.split(": ")  # file: field: key inside its table
    ends = [".".join(parts[at:]) for at in reversed(range(len(parts)))]
    return next((key for end in ends for key in keys if end.startswith(key)), "")


def beside(error: InputError) -> str:
    """Return an error as it stands beside its field, which says the place."""
    found = "nothing is given" if error.value is None else f"it {error.found}"
    if not isinstance(error.value, Fault | None):
        found = f"{written(error.value)} cannot be used"
    way_out = f" ({error.way_out})" if error.way_out else ""
    return f"{found}: expected {error.expectation}{way_out}"


@cache
def _words() -> Mapping[str, str]:
    """Return the label of each key of a scenario, the longest key first."""
    labels = {field.key: field.label for field in fields()}
    return {key: labels[key] for key in sorted(labels, key=len, reverse=True)}


def label_of(key: str, classes: int = 0) -> str:
    """Return the words above a field; empty where the page has none of that key."""
    return next((field.label for field in fields(classes) if field.key == key), "")


def in_words(text: str) -> str:
    """Return what a command says as the page says it: labels for keys, pools without options."""
    text = POOL.sub(r"\2 \1", text).replace("--set ", "")
    for key, label in _words().items():
        text = re.sub(rf"`?\b{re.escape(key)}\b`?", QUOTED.format(label), text)
    return text


def changed_labels(before: Case, after: Case) -> list[str]:
    """Return in words what differs between two cases."""
    if before.base != after.base:
        return [f"Start from {after.base}"]
    old, new = before.texts(), after.texts()
    classes = max(class_count(old), class_count(new))
    changed = [
        f"{field.label} {old.get(field.key) or 'none'} → {new.get(field.key) or 'none'}"
        for field in fields(classes)
        if old.get(field.key, "") != new.get(field.key, "")
    ]
    return changed or (["the files that were read"] if before != after else [])


def scenario_file(asked: Scenario, config: str) -> str:
    """Return a scenario as a file; a model that was dropped in, *config*, is looked for beside."""
    text = asked.to_toml()
    if not config:
        return text
    told = f"# The config.json that was dropped in belongs into {config_name(config)}/.\n"
    path, beside_it = str(config_folder(config)), f"./{config_name(config)}"
    return told + text.replace(json.dumps(path), json.dumps(beside_it))
