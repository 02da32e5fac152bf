"""Tables as values, their cells in the units of people, and those that plans share."""

from __future__ import annotations

from math import floor
from typing import TYPE_CHECKING, Any

from minicluster.pages.page import Cell, ChartRow, DataTable, FactTable, Page, Section, Text
from minicluster.phases import label
from minicluster.specs.slo import PERCENTILES, SloSpec
from minicluster.units import counted, seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from minicluster.plan import Latency, Plan, Pool, Prediction
    from sizing.planner.explanation import ExplainedTerm, Explanation, ModelMemory, PoolMemory

BOUND = "bound by,\nof peak"
GB = 1e9
MB = 1e6
KB = 1e3
SHOWN = tuple(statistic for statistic in PERCENTILES if statistic != "p90")


def table(
    title: str,
    heads: Sequence[str],
    rows: Iterable[Sequence[str | Cell]],
    *,
    words: Iterable[str] = (),
    details: Sequence[str] = (),
    notes: Iterable[str] = (),
) -> Section:
    """
    Return a section of one table, and sentences below it.

    Args:
        rows: missing cells at their ends are empty.
        words, details: heads, as of `DataTable`.
    """
    filled = (tuple(row) + ("",) * (len(heads) - len(row)) for row in rows)
    shown = DataTable(tuple(heads), tuple(filled), tuple(words), tuple(details))
    return Section(title, (shown, *map(Text, notes)))


def columns_table(
    title: str,
    columns: Mapping[str, Sequence[str | Cell]],
    **options: Any,  # noqa: ANN401  (any of `table`)
) -> Section:
    """Return the table of *columns*, cells by head; see `table`."""
    return table(title, tuple(columns), zip(*columns.values(), strict=True), **options)


def facts(title: str, rows: Iterable[tuple[str, str]], notes: Iterable[str] = ()) -> Section:
    """Return a section of names and what is said of each, and sentences below it."""
    return Section(title, (FactTable(tuple(rows)), *map(Text, notes)))


def answer_page(parts: Sequence[Section | ChartRow], *, title: str, footer: str) -> Page:
    """Return the page of sections: the first one's heading is the answer, its texts follow it."""
    head = next(part for part in parts if isinstance(part, Section))
    return Page(
        title=title,
        headline=head.title,
        lines=tuple(block.text for block in head.blocks if isinstance(block, Text)),
        parts=tuple(part for part in parts if part is not head),
        footer=f"minicluster, {footer}",
    )


def verdict(*, holds: bool, limit: str = "") -> Cell:
    """Write whether a limit holds, in green or red."""
    return Cell(f"{limit}{'holds' if holds else 'missed'}", "good" if holds else "bad")


def size(value: float) -> str:
    """Write bytes in GB, or in MB below a tenth of one."""
    return f"{value / GB:.1f} GB" if value >= GB / 10 else f"{value / MB:.0f} MB"


def latency(value_s: float | None) -> str:
    """Write a latency; nothing where there is none, as for classes that each have their own."""
    return "" if value_s is None else seconds(value_s)


def number(value: float | None, form: str = ",.2f") -> str:
    """Write a number; a hyphen where it is unknown."""
    return "-" if value is None else format(value, form)


TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
MEMORY = ((GB, "GB"), (MB, "MB"))


def summed(values: Iterable[float], units: Sequence[tuple[float, str]]) -> list[str]:
    """
    Write values, and then their sum, so that the printed numbers add up to the printed sum.

    All have the unit of the sum and its last of four digits; what rounding leaves goes to those
    that it takes most from.

    Args:
        units: sizes and names, the largest first.
    """
    parts = list(values)
    total = sum(parts)
    scale, unit = next((unit for unit in units if abs(total) >= unit[0]), units[-1])
    whole = len(f"{abs(total) / scale:.0f}")
    digits = max(0, 4 - whole)
    exact = [value / scale * 10**digits for value in parts]
    steps = [floor(value) for value in exact]
    left = round(sum(exact)) - sum(steps)
    for at in sorted(range(len(parts)), key=lambda at: steps[at] - exact[at])[:left]:
        steps[at] += 1
    return [f"{step / 10**digits:,.{digits}f} {unit}" for step in (*steps, sum(steps))]


def layout_table(pools: tuple[Pool, ...], prediction: Prediction) -> Section:
    """Return one row per pool: size, limits, utilisation, bottleneck."""
    heads = ("pool", "replicas", "TP", "GPUs", "batch", "KV/GPU", "of capacity", "bound by")
    rows = (
        (
            pool_name(pool, pools),
            str(pool.replicas),
            sliced(pool),
            str(pool.gpus),
            f"≤ {pool.max_num_seqs}",
            size(pool.kv_bytes),
            f"{prediction.utilisation_fraction[pool.role]:.0%}",
            prediction.bottleneck[pool.role],
        )
        for pool in pools
    )
    return table("Layout", heads, rows, words=("bound by",))


def pool_name(pool: Pool, pools: tuple[Pool, ...]) -> str:
    """Name a pool by its role, and by its GPU where kinds differ."""
    several = len({each.gpu for each in pools}) > 1
    return f"{pool.role} on {pool.gpu}" if several else pool.role


def sliced(pool: Pool) -> str:
    """Write the TP of a replica, and the other degrees above 1: `4 PP2`."""
    return str(pool.slicing).removeprefix("TP").replace("x", " ")


def free_gpus(plan: Plan) -> str:
    """Return how many GPUs of its nodes the plan leaves free; empty if none."""
    unit = "core" if plan.inputs.gpu.kind == "cpu" else "GPU"
    stranded = plan.cost.stranded_gpus
    stay = "stays" if stranded == 1 else "stay"
    return f", {counted(stranded, unit)} {stay} free" if stranded else ""


def latency_table(prediction: Prediction, slos: Mapping[str, SloSpec]) -> Section:
    """
    Return one row per latency: statistics, interval, limit, verdict.

    Of several classes of requests, latencies of all requests come first, without limits.
    """
    at = judged_at(slos)
    heads = ("", *SHOWN, f"80 % interval{at}", f"SLO{at}")
    judged = slos.items() if "" in slos else [("", SloSpec()), *slos.items()]
    rows = []
    for of, slo in judged:
        gaps = not of or slo.itl_s is not None  # those of all classes
        for name in ("ttft", "tpot", *(["itl"] if gaps else []), "e2e"):
            predicted = prediction.latency(name, of)
            limit_s = slo.limits_s.get(name) if of in slos else None
            value_s = predicted.at(slo.percentile)
            limit = f"{'' if at else slo.percentile} < {seconds(limit_s or 0)} ".lstrip()
            rows.append(
                (
                    f"{of} {name.upper()}".strip(),
                    *(seconds(predicted.at(statistic)) for statistic in SHOWN),
                    (interval(predicted, slo.percentile) if of in slos else "") or "-",
                    "" if limit_s is None else verdict(holds=value_s <= limit_s, limit=limit),
                )
            )
    return table("Predicted latency", heads, rows, details=("mean", "p95"))


def judged_at(slos: Mapping[str, SloSpec]) -> str:
    """Return ` at p99`, the percentile of all classes; empty where theirs differ."""
    percentiles = {slo.percentile for slo in slos.values()}
    return f" at {percentiles.pop()}" if len(percentiles) == 1 else ""


def interval(predicted: Latency, statistic: str) -> str:
    """Write the 80 % interval around a statistic; empty where no measurement gives one."""
    if predicted.low_factor is None or predicted.high_factor is None:
        return ""
    value = predicted.at(statistic)
    return f"{seconds(value * predicted.low_factor)} to {seconds(value * predicted.high_factor)}"


def parts_table(prediction: Prediction) -> Section:
    """Return the mean TTFT by phase, with shares."""
    total = prediction.ttft.mean_s
    rows = [
        (label(name), seconds(value), f"{value / total:.1%}")
        for name, value in prediction.ttft_parts_s.items()
    ]
    title = "Mean TTFT, in the order of the deployed system"
    return table(
        title, ("phase", "seconds", "share"), [*rows, bold("TTFT", seconds(total), "100.0%")]
    )


def bold(*cells: str) -> tuple[Cell, ...]:
    """Return the row of a sum."""
    return tuple(Cell(cell, "bold") for cell in cells)


def _memory_section(memory: ModelMemory) -> Section:
    """Return what is checked first of a model: its size, what caches, and what fits."""
    caching = ", ".join(f"{count} {kind}" for kind, count in memory.layers.items())
    windows = f"; windows of {memory.window_tokens:,} tokens" if memory.window_tokens else ""
    sizes = (
        f"Model: {memory.parameters / 1e9:,.1f} billion parameters,"
        f" {memory.active_parameters / 1e9:,.1f} of them for a token;"
        f" layers that cache: {caching}{windows}"
    )
    parts = [summed(pool.parts_bytes.values(), MEMORY) for pool in memory.pools]
    names = [*memory.pools[0].parts_bytes, "sum: memory of a GPU (M4)"]
    cells: dict[str, Callable[[PoolMemory], str]] = {
        "KV cache of a token (M2)": lambda pool: f"{pool.kv_bytes_per_token / KB:,.1f} kB",
        "state of a sequence (M6)": lambda pool: f"{pool.state_bytes / MB:,.1f} MB",
        "a block (M12)": lambda pool: (
            f"{pool.block_bytes / MB:,.2f} MB, {pool.block_tokens:,} tokens"
        ),
        "fit in a replica, mean": lambda pool: _fitting(pool, min(pool.sequences)),
        "fit in a replica, longest": lambda pool: _fitting(pool, max(pool.sequences)),
    }
    rows = list(zip(names, *parts, strict=True))
    rows += [(name, *map(cell, memory.pools)) for name, cell in cells.items()]
    return table("Memory", ("", *(pool.role for pool in memory.pools)), rows, notes=[sizes])


def _fitting(pool: PoolMemory, tokens: int) -> str:
    return f"{pool.sequences[tokens]:,} of {tokens:,} tokens"


def explanation_sections(explained: Explanation) -> Iterator[Section]:
    """Yield the model's memory, a table per group of terms, and what ranks wait for."""
    yield _memory_section(explained.memory)
    titles = {
        "TTFT": "Mean TTFT",
        "TPOT": "Mean TPOT",
        "prefill step": f"Prefill of {explained.mean_prompt_tokens:.0f} tokens,"
        " without interference",
        "decode step": f"Decode step of {explained.mean_batch:.1f} sequences with"
        f" {explained.mean_context_tokens:.0f} tokens each, without interference"
        f"{_drafts(explained)}",
    }
    for of, title in titles.items():
        terms = [term for term in explained.terms if term.of == of]
        heads = ["term", "eq.", "seconds", "share"]
        if any(term.bound for term in terms):
            heads += ["TFLOP", "GB", BOUND]
        *times, total = summed([term.seconds for term in terms], TIMES)
        rows: list[Sequence[str | Cell]] = [
            _term_cells(term, time)[: len(heads)] for term, time in zip(terms, times, strict=True)
        ]
        rows.append(bold("sum", "", total, "100.0%"))
        hidden = [f"{label(term.name)} {seconds(term.hidden_s)}" for term in terms if term.hidden_s]
        notes = ["; ".join(sorted({term.source for term in terms}))]
        if hidden:
            notes.append(
                f"{of.capitalize()} in two halves: {', '.join(hidden)} are hidden behind compute;"
                " above is what is left of them (eq. S11)."
            )
        words, details = ("eq.", BOUND), ("TFLOP", "GB", "share")
        yield table(title, heads, rows, words=words, details=details, notes=notes)
    if any(explained.interference.values()):
        slower = ((role, f"{share:.1%}") for role, share in explained.interference.items())
        heads = ["pool", "steps take longer by"]
        yield table("Interference between the pools (eq. Q9)", heads, slower)
    if waits := [*_waits(explained)]:
        yield Section("", tuple(map(Text, waits)))


def _waits(explained: Explanation) -> Iterator[str]:
    """Yield what the ranks of a group wait for; a step is timed on the busiest one."""
    for role, share in explained.busiest_experts.items():
        yield (
            f"{role.capitalize()}: `experts` are timed on the busiest rank, which has {share:.2f}"
            " times the tokens of the average rank (eq. W11)."
        )
    if explained.group_wait_s:
        yield (
            "Decode: the ranks of a group wait for the slowest one, which adds"
            f" {seconds(explained.group_wait_s)} to the mean TPOT (both are simulated, eq. Q11)."
        )


def _drafts(explained: Explanation) -> str:
    """Say what a step does with drafts; nothing where there are none."""
    if not explained.drafts:
        return ""
    what = "draft" if explained.drafts == 1 else "drafts"
    return (
        f": it verifies {explained.drafts} {what} of each, gives {explained.tokens_per_step:.3g}"
        " tokens each on average, and drafts the next ones (the terms with `draft`)"
    )


def _term_cells(term: ExplainedTerm, time: str) -> list[str]:
    return [
        label(term.name),
        term.equation,
        time,
        f"{round(term.share_fraction, 3) + 0:.1%}",
        f"{term.flops / 1e12:.3g}" if term.flops else "",
        f"{term.hbm_bytes / 1e9:.3g}" if term.hbm_bytes else "",
        (term.bound or "").partition(" ")[0]
        + ("" if term.achieved_fraction is None else f" {term.achieved_fraction:.0%}"),
    ]
