"""Tables of the terminal, and those of plans: layouts, latencies, phases, terms."""

from __future__ import annotations

from math import floor
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.table import Column, Table
from rich.text import Text

from minicluster.pages.page import DataTable, Section
from minicluster.phases import label
from minicluster.specs.slo import PERCENTILES, SloSpec
from minicluster.units import seconds

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

    from minicluster.plan import Latency, Plan, Pool, Prediction
    from sizing.planner.explanation import ExplainedTerm, Explanation, ModelMemory, PoolMemory

BOUND = "bound by,\nof peak"
GB = 1e9
MB = 1e6
KB = 1e3
SHOWN = tuple(each for each in PERCENTILES if each != "p90")


def table(
    title: str,
    heads: Iterable[str | Column],
    rows: Iterable[Iterable[Any]],
    *,
    left: Container[str] = (),
    whole: Container[str] = (),
    **options: Any,  # noqa: ANN401  (any of Rich's)
) -> Table:
    """
    Return a table with its title to the left.

    Args:
        heads: the first column is aligned to the left, the others to the right.
        left: heads of further columns that are aligned to the left.
        whole: heads of columns whose cells are not wrapped.
    """
    columns = [
        head
        if isinstance(head, Column)
        else Column(
            head, no_wrap=head in whole, justify="right" if at and head not in left else "left"
        )
        for at, head in enumerate(heads)
    ]
    made = Table(*columns, title=title, title_justify="left", **options)
    for row in rows:
        made.add_row(*row)
    return made


def columns_table(
    title: str,
    columns: Mapping[str, Sequence[Any]],
    **options: Any,  # noqa: ANN401  (any of `table`)
) -> Table:
    """Return the table of *columns*, cells by head; see `table`."""
    return table(title, columns, zip(*columns.values(), strict=True), **options)


def facts_table(title: str, rows: Iterable[tuple[str, str]], **options: Any) -> Table:  # noqa: ANN401
    """Return a table of two columns, names and texts, without headings."""
    return table(title, ("", ""), rows, left=("",), show_header=False, **options)


def data_table(shown: Table) -> DataTable:
    """Return a table of the terminal as one of a page."""
    heads = tuple(str(column.header) for column in shown.columns)
    rows = zip(*(column.cells for column in shown.columns), strict=True)
    return DataTable(heads, tuple(tuple(getattr(c, "plain", c) for c in row) for row in rows))


def titled_section(shown: Table) -> Section:
    """Return a table of the terminal as a section of a page."""
    return Section(str(shown.title or ""), (data_table(shown),))


def verdict(*, holds: bool, limit: str = "") -> Text:
    """Write whether a limit holds, in green or red."""
    word, style = ("holds", "green") if holds else ("missed", "red")
    return Text(f"{limit}{word}", style=style)


def size(value: float) -> str:
    """Write bytes in GB, or in MB below a tenth of one."""
    return f"{value / GB:.1f} GB" if value >= GB / 10 else f"{value / MB:.0f} MB"


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
    scale, unit = next((each for each in units if abs(total) >= each[0]), units[-1])
    whole = len(f"{abs(total) / scale:.0f}")
    digits = max(0, 4 - whole)
    exact = [value / scale * 10**digits for value in parts]
    steps = [floor(value) for value in exact]
    left = round(sum(exact)) - sum(steps)
    for at in sorted(range(len(parts)), key=lambda at: steps[at] - exact[at])[:left]:
        steps[at] += 1
    return [f"{step / 10**digits:,.{digits}f} {unit}" for step in (*steps, sum(steps))]


def layout_table(pools: tuple[Pool, ...], prediction: Prediction) -> Table:
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
    return table("Layout", heads, rows, left=("bound by",))


def pool_name(pool: Pool, pools: tuple[Pool, ...]) -> str:
    """Name a pool by its role, and by its GPU where kinds differ."""
    several = len({each.gpu for each in pools}) > 1
    return f"{pool.role} on {pool.gpu}" if several else pool.role


def sliced(pool: Pool) -> str:
    """Write the TP of a replica, and the other degrees above 1: `4 PP2`."""
    return str(pool.slicing).removeprefix("TP").replace("x", " ")


def free_gpus(plan: Plan) -> str:
    """Return how many GPUs of its nodes the plan leaves free; empty if none."""
    unit = "cores" if plan.inputs.gpu.kind == "cpu" else "GPUs"
    stranded = plan.cost.stranded_gpus
    return f", {stranded} {unit} stay free" if stranded else ""


def latency_table(prediction: Prediction, slos: Mapping[str, SloSpec]) -> Table:
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
            latency = prediction.latency(name, of)
            limit_s = slo.limits_s.get(name) if of in slos else None
            value_s = latency.at(slo.percentile)
            limit = f"{'' if at else slo.percentile} < {seconds(limit_s or 0)} ".lstrip()
            rows.append(
                (
                    f"{of} {name.upper()}".strip(),
                    *(seconds(latency.at(each)) for each in SHOWN),
                    (interval(latency, slo.percentile) if of in slos else "") or "-",
                    Text() if limit_s is None else verdict(holds=value_s <= limit_s, limit=limit),
                )
            )
    return table("Predicted latency", heads, rows)


def judged_at(slos: Mapping[str, SloSpec]) -> str:
    """Return ` at p99`, the percentile of all classes; empty where theirs differ."""
    percentiles = {slo.percentile for slo in slos.values()}
    return f" at {percentiles.pop()}" if len(percentiles) == 1 else ""


def interval(latency: Latency, statistic: str) -> str:
    """Write the 80 % interval around a statistic; empty where no measurement gives one."""
    if latency.low_factor is None or latency.high_factor is None:
        return ""
    value = latency.at(statistic)
    return f"{seconds(value * latency.low_factor)} to {seconds(value * latency.high_factor)}"


def parts_table(prediction: Prediction) -> Table:
    """Return the mean TTFT by phase, with shares."""
    total = prediction.ttft.mean_s
    rows = (
        (label(name), seconds(value), f"{value / total:.1%}")
        for name, value in prediction.ttft_parts_s.items()
    )
    title = "Mean TTFT, in the order of the deployed system"
    made = table(title, ("phase", "seconds", "share"), rows)
    made.add_row("TTFT", seconds(total), "100.0%", style="bold")
    return made


def _memory_parts(found: ModelMemory) -> Iterator[Table | str]:
    """Yield what is checked first of a model: its size, what caches, and what fits."""
    caching = ", ".join(f"{number} {kind}" for kind, number in found.layers.items())
    seen = f"; windows of {found.window_tokens:,} tokens" if found.window_tokens else ""
    yield (
        f"Model: {found.parameters / 1e9:,.1f} billion parameters,"
        f" {found.active_parameters / 1e9:,.1f} of them for a token;"
        f" layers that cache: {caching}{seen}"
    )
    parts = [summed(pool.parts_bytes.values(), MEMORY) for pool in found.pools]
    names = [*found.pools[0].parts_bytes, "sum: memory of a GPU (M4)"]
    rows = {
        **dict(zip(names, zip(*parts, strict=True), strict=True)),
        "KV cache of a token (M2)": [
            f"{each.kv_bytes_per_token / KB:,.1f} kB" for each in found.pools
        ],
        "state of a sequence (M6)": [f"{each.state_bytes / MB:,.1f} MB" for each in found.pools],
        "a block (M12)": [
            f"{each.block_bytes / MB:,.2f} MB, {each.block_tokens:,} tokens" for each in found.pools
        ],
    }
    for which in ("mean", "longest"):
        name = f"fit in a replica, {which}"
        rows[name] = [_fitting(each, longest=which == "longest") for each in found.pools]
    heads = ["", *(each.role for each in found.pools)]
    lines = ((name, *cells) for name, cells in rows.items())
    yield table("Memory", heads, lines, left=("",))


def _fitting(pool: PoolMemory, *, longest: bool) -> str:
    tokens = (max if longest else min)(pool.sequences)
    return f"{pool.sequences[tokens]:,} of {tokens:,} tokens"


def explanation_tables(found: Explanation) -> Iterator[Table | str]:
    """Yield the model's memory, a table per group of terms, and what ranks wait for."""
    yield from _memory_parts(found.memory)
    at = {
        "TTFT": "Mean TTFT",
        "TPOT": "Mean TPOT",
        "prefill step": f"Prefill of {found.mean_prompt_tokens:.0f} tokens, without interference",
        "decode step": f"Decode step of {found.mean_batch:.1f} sequences with"
        f" {found.mean_context_tokens:.0f} tokens each, without interference{_drafts(found)}",
    }
    for of, title in at.items():
        terms = [term for term in found.terms if term.of == of]
        heads = ["term", "eq.", "seconds", "share"]
        if any(term.bound for term in terms):
            heads += ["TFLOP", "GB", BOUND]
        times = summed([term.seconds for term in terms], TIMES)
        rows = (
            _term_cells(term, time)[: len(heads)] for term, time in zip(terms, times, strict=False)
        )
        sources = "; ".join(sorted({term.source for term in terms}))
        made = table(
            title, heads, rows, left=("eq.", BOUND), whole=heads, caption=sources,
            box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False,
        )  # fmt: skip
        made.add_row("sum", "", times[-1], "100.0%", style="bold")
        yield made
        hidden = [f"{label(term.name)} {seconds(term.hidden_s)}" for term in terms if term.hidden_s]
        if hidden:
            yield (
                f"{of.capitalize()} in two halves: {', '.join(hidden)} are hidden behind compute;"
                " above is what is left of them (eq. S11)."
            )
    if any(found.interference.values()):
        slower = ((role, f"{fraction:.1%}") for role, fraction in found.interference.items())
        heads = ["pool", "steps take longer by"]
        yield table("Interference between the pools (eq. Q9)", heads, slower)
    yield from _ranks_text(found)


def _ranks_text(found: Explanation) -> Iterator[str]:
    """Yield what the ranks of a group wait for; a step is timed on the busiest one."""
    for role, share in found.busiest_experts.items():
        yield (
            f"{role.capitalize()}: `experts` are timed on the busiest rank, which has {share:.2f}"
            " times the tokens of the average rank (eq. W11)."
        )
    if found.group_wait_s:
        yield (
            "Decode: the ranks of a group wait for the slowest one, which adds"
            f" {seconds(found.group_wait_s)} to the mean TPOT (both are simulated, eq. Q11)."
        )


def _drafts(found: Explanation) -> str:
    """Say what a step does with drafts; nothing where there are none."""
    if not found.drafts:
        return ""
    what = "draft" if found.drafts == 1 else "drafts"
    return (
        f": it verifies {found.drafts} {what} of each, gives {found.tokens_per_step:.3g} tokens"
        " each on average, and drafts the next ones (the terms with `draft`)"
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
