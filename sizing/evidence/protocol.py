"""Protocols of sources: how rows were measured, beyond their columns."""

from __future__ import annotations

import csv
from dataclasses import dataclass, fields
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING

from minicluster.config import parse, read_toml
from minicluster.specs.checks import Spec
from minicluster.specs.gpu import NumberSource
from sizing.catalog import configs, model_family, release

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sizing.evidence.measured_row import MeasuredRow

FILE = "validation/protocols.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementProtocol(Spec):
    """
    One workload that a source ran.

    Attributes:
        prompts: different ones; they are sent in turn, again and again, so that all but the first
            round finds them whole in the prefix cache.
        stages_per_s: arrival rates of runs, each in stages, one after the other.
        stage_s: how long one lasts.
        max_batch_size: sequences of a step.
    """

    source: str
    input_tokens: int
    output_tokens: int
    prompts: int
    stages_per_s: tuple[tuple[float, ...], ...]
    stage_s: float
    max_batch_size: int

    def cold(self, requests_per_s: float) -> int:
        """Prompts that a stage of this rate is the first to send."""
        return self.prompts if any(run[0] == requests_per_s for run in self.stages_per_s) else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeSettings(Spec):
    """
    Settings with which a source started an engine; `None`: the engine's default.

    Attributes:
        token_budget: tokens of a step.
        prompts_per_step: nominal prompts that the token budget holds, in place of a number.
        spare_tokens: of a recipe made for one load: what its token budget has beyond a prompt and
            a token of every user, in place of a number.
        captured_tokens: steps with prompts of at most this many tokens are CUDA graphs.
        receive_steps: decode steps from one look at new requests to the next.
        wait_steps: most steps that prompts wait for others while sequences decode.
        wait_fraction: share of the token budget that, once filled, ends the wait.
    """

    token_budget: int | None = None
    prompts_per_step: int | None = None
    spare_tokens: int | None = None
    captured_tokens: int | None = None
    receive_steps: int | None = None
    wait_steps: int | None = None
    wait_fraction: float | None = None


SETTINGS = tuple(each.name for each in fields(RecipeSettings))


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe(RecipeSettings):
    """
    The rows of closed loops that were measured with some settings.

    Attributes:
        model: of whose family the row's is (InferenceX ran one size of each); empty, like the next
            two: any.
        gpus: of these kinds.
        weight_dtype: of the row.
        measured_from: first day; a row without a day is not one.
        version_from: first engine version; a row without a version is not one.
        input_tokens, output_tokens: of this load only; `None`: of any.
        tp_below: of narrower replicas only; `None`: of any.
        users_from: least concurrency.
    """

    source: str
    engine: str
    model: str = ""
    gpus: tuple[str, ...] = ()
    weight_dtype: str = ""
    measured_from: str = ""
    version_from: tuple[int, ...] = ()
    input_tokens: int | None = None
    output_tokens: int | None = None
    tp_below: int | None = None
    users_from: int = 0

    def made(self, row: MeasuredRow) -> bool:
        """Say whether an aggregated row was measured with these settings."""
        return (
            (self.source, self.engine, "closed") == (row.source, row.engine.lower(), row.load)
            and (not self.model or model_family(self.model) == model_family(row.model))
            and (not self.gpus or row.gpu in self.gpus)
            and self.weight_dtype in ("", row.weight_dtype)
            and row.measured >= self.measured_from
            and release(row.engine_version) >= self.version_from
            and self.input_tokens in (None, row.isl)
            and self.output_tokens in (None, row.osl)
            and (self.tp_below is None or row.groups[0].slicing.tp < self.tp_below)
            and row.amount >= self.users_from
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnLengths(Spec):
    """How much the lengths of a source's requests differ, where its rows leave the column empty."""

    source: str
    model: str
    length_jitter: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRange(Spec):
    """The shortest and longest prompt of a source whose rows only say what they have on average."""

    source: str
    shortest: int
    longest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedPrompts(Spec):
    """
    A source that sends the same prompts at one rate after another to one server.

    Attributes:
        first_per_s: rate of the first run, the only one whose prompts are not cached.
    """

    source: str
    first_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance(Spec):
    """
    Drafts that are accepted on average, as published for a model.

    Attributes:
        source: of the rows that it is taken for, where these do not count.
        model: of whose family theirs is.
        speculative_tokens: drafted in a step.
        mean_accepted_tokens: without the token that the step gives anyway.
        text: what was generated where it was measured.
    """

    source: str
    model: str
    speculative_tokens: int
    mean_accepted_tokens: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Protocols(Spec):
    workloads: tuple[MeasurementProtocol, ...]
    lengths: tuple[DrawnLengths, ...]
    prompt_ranges: tuple[PromptRange, ...]
    replays: tuple[ReplayedPrompts, ...]
    recipes: tuple[Recipe, ...]
    acceptances: tuple[Acceptance, ...]
    sources: tuple[NumberSource, ...]


@cache
def _protocols() -> _Protocols:
    return parse(_Protocols, read_toml(configs() / FILE), place=FILE)


def protocol_of(row: MeasuredRow) -> MeasurementProtocol | None:
    """Return the workload that an open row is a stage of; `None`: its columns say everything."""
    for each in _protocols().workloads:
        rates = {rate for run in each.stages_per_s for rate in run}
        if (row.source, row.isl, row.osl, row.load) == (
            each.source, each.input_tokens, each.output_tokens, "open",
        ) and row.amount in rates:  # fmt: skip
            return each
    return None


def sent_earlier(row: MeasuredRow) -> bool:
    """Say whether all prompts of an open row were sent to its server before, in a run before."""
    return row.load == "open" and any(
        row.source == each.source and row.amount != each.first_per_s
        for each in _protocols().replays
    )


def jitter_of(source: str, model: str) -> float:
    """Return the length jitter of rows that do not say; 0 where nothing is known of them."""
    known = (each for each in _protocols().lengths if (each.source, each.model) == (source, model))
    return next((each.length_jitter for each in known), 0.0)


def prompt_range_of(row: MeasuredRow) -> PromptRange | None:
    """Return the range of an open row's prompts; `None`: it is not known, or they are alike."""
    if row.load != "open" or not row.means_only:
        return None
    return next((each for each in _protocols().prompt_ranges if each.source == row.source), None)


def acceptance_of(row: MeasuredRow) -> Acceptance | None:
    """Return what is published of a row's drafts; `None`: nothing."""
    for each in _protocols().acceptances:
        same_model = model_family(each.model) == model_family(row.model)
        if same_model and (each.source, each.speculative_tokens) == (
            row.source, row.speculative_tokens,
        ):  # fmt: skip
            return each
    return None


def recipe_of(row: MeasuredRow) -> RecipeSettings:
    """Return the settings of an aggregated row's engine: of all its recipes, the last says."""
    found = {
        name: getattr(each, name)
        for each in _protocols().recipes
        if each.made(row)
        for name in SETTINGS
        if getattr(each, name) is not None
    }
    return RecipeSettings(**found)


SPLIT_FILE = "validation/split_recipes.csv"
SOURCE = "inferencex"
"""Whose rows were measured with the recipes of the file."""
ROLES = ("prefill", "decode")
LAYOUT = ("replicas", "gpus", "dp")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """
    Settings of one attention rank of a pool; `None`: the engine's default.

    Attributes:
        max_num_batched_tokens: tokens of a step.
        max_num_seqs: sequences of a step.
        kv_tokens: tokens that its KV cache is limited to.
        receive_steps: decode steps from one look at new requests to the next.
    """

    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    kv_tokens: int | None = None
    receive_steps: int | None = None


Key = tuple[str | int, ...]
"""Engine, GPU, family of the model, dtype of weights, lengths, users, layout of both pools."""
POOL_SETTINGS = tuple(each.name for each in fields(PoolSettings))


def pool_settings(row: MeasuredRow) -> Mapping[str, PoolSettings]:
    """Return the settings of both pools by role; empty: no recipe is known for such a row."""
    if row.source != SOURCE or len(row.groups) == 1 or row.load != "closed":
        return {}
    load = (row.engine.lower(), row.gpu, model_family(row.model), row.weight_dtype)
    layouts = ((each.replicas, each.slicing.gpus, each.slicing.dp) for each in row.groups)
    layout = chain.from_iterable(layouts)
    return _split_recipes().get((*load, row.isl, row.osl, int(row.amount), *layout), {})


@cache
def _split_recipes() -> dict[Key, dict[str, PoolSettings]]:
    """Read the recipes, each once for every number of users that it was run with."""
    found: dict[Key, dict[str, PoolSettings]] = {}
    with (configs() / SPLIT_FILE).open(encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            load = (line["engine"], line["gpu"], model_family(line["model"]), line["weight_dtype"])
            lengths = int(line["isl"]), int(line["osl"])
            layout = [int(line[f"{role}_{name}"]) for role in ROLES for name in LAYOUT]
            settings = {}
            for role in ROLES:
                cells = {name: line.get(f"{role}_{name}") for name in POOL_SETTINGS}
                given = {name: int(cell) for name, cell in cells.items() if cell}
                settings[role] = PoolSettings(**given)
            for users in line["users"].split():
                found[(*load, *lengths, int(users), *layout)] = settings
    return found
