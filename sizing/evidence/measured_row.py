"""A measured row: deployment, load and measured times."""

from __future__ import annotations

from dataclasses import dataclass

from minicluster.specs.slicing import Slicing

SPECULATIVE = "speculative"
"""Kind of every row that was measured with speculative decoding, under any load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Equal replicas of one role: `mixed`, `prefill` or `decode`."""

    role: str
    replicas: int
    slicing: Slicing


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRow:
    """
    One measured row.

    Attributes:
        kv_dtype: empty: the engine's default.
        groups: one mixed group, or prefill and decode.
        amount: prompts of the batch, users or requests per second, as `load` says.
        length_jitter: j; lengths are uniform in [(1 - j) nominal, nominal].
        prefix_tokens: of `isl`, already in the prefix cache.
        statistic: what the measured times are: `mean` or `median`.
        tpot_p99_s: 99 % of the requests' mean times per output token are below.
        token_budget: tokens a step may hold, where known.
        max_num_seqs: sequences a step may hold on one attention rank, where known.
        measured: day, year first; empty: unknown.
        num_requests: of an open or closed loop, where known.
        means_only: its lengths are distributions of which only the means are known.
        speculative_tokens: drafted for each sequence and step; 0: none.
        accepted_tokens: of these, accepted on average; `None`: not counted.
        excluded: why the row is left out of errors and intervals; empty: it is not.
    """

    place: str
    id: str
    source: str
    model: str
    gpu: str
    engine: str
    engine_version: str
    weight_dtype: str
    kv_dtype: str
    groups: tuple[Group, ...]
    load: str
    amount: float
    isl: int
    osl: int
    length_jitter: float
    prefix_tokens: int
    statistic: str
    ttft_s: float | None
    tpot_s: float | None
    ttft_p99_s: float | None
    tpot_p99_s: float | None
    token_budget: int | None
    max_num_seqs: int | None
    measured: str
    num_requests: int | None
    means_only: bool
    speculative_tokens: int
    accepted_tokens: float | None
    excluded: str = ""

    @property
    def configuration(self) -> str:
        """Name model, GPU, engine, precision and parallelism: all loads of one share it."""
        shapes = "+".join(
            f"{g.replicas}x{g.slicing.tp}.{g.slicing.pp}.{g.slicing.ep}.{g.slicing.dp}"
            for g in self.groups
        )
        names = f"{self.model}/{self.gpu}/{self.engine}"
        if self.speculative_tokens:
            shapes += f"+{self.speculative_tokens} drafts"
        return f"{names}/{self.weight_dtype}/{self.kv_dtype}/{shapes}"


def kind_of(row: MeasuredRow) -> str:
    """Name a row's kind of load, by which errors are grouped."""
    if row.speculative_tokens:
        return SPECULATIVE
    if len(row.groups) > 1:
        return "split"
    if row.load == "closed" and not row.length_jitter:
        return "closed, fixed lengths"
    if row.load == "open" and row.means_only:
        return "open, mean lengths"
    return row.load
