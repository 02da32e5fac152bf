"""The terms of a prediction as tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from minicluster.phases import label
from minicluster.units import seconds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sizing.planner.explanation import Explanation


def explanation_tables(found: Explanation) -> Iterator[Table]:
    """Yield one table per group of terms."""
    at = {
        "TTFT": "Mean TTFT",
        "prefill step": f"Prefill of {found.mean_prompt_tokens:.0f} tokens, without interference",
        "decode step": f"Decode step of {found.mean_batch:.1f} sequences with"
        f" {found.mean_context_tokens:.0f} tokens each, without interference",
    }
    for of, title in at.items():
        terms = [term for term in found.terms if term.of == of]
        detailed = any(term.bound for term in terms)
        sources = sorted({term.source for term in terms})
        table = Table(title=title, title_justify="left", caption="; ".join(sources))
        for heading in ("term", "equation", "seconds", "share"):
            table.add_column(
                heading, justify="right" if heading in ("seconds", "share") else "left"
            )
        if detailed:
            for heading in ("TFLOP", "GB", "of peak", "bound by"):
                table.add_column(heading, justify="left" if heading == "bound by" else "right")
        for term in terms:
            row = [
                label(term.name),
                term.equation,
                seconds(term.seconds),
                f"{term.share_fraction:.1%}",
            ]
            if detailed:
                row += [
                    f"{term.flops / 1e12:.3g}" if term.flops else "",
                    f"{term.hbm_bytes / 1e9:.3g}" if term.hbm_bytes else "",
                    "" if term.achieved_fraction is None else f"{term.achieved_fraction:.0%}",
                    (term.bound or "").partition(" ")[0],
                ]
            table.add_row(*row)
        total = sum(term.seconds for term in terms)
        table.add_row("sum", "", seconds(total), "100.0%", style="bold")
        yield table
    if any(found.interference.values()):
        yield _interference(found)


def _interference(found: Explanation) -> Table:
    """Return how much the other pool slows the steps of each."""
    table = Table(title="Interference between the pools (eq. T12)", title_justify="left")
    table.add_column("pool")
    table.add_column("steps take longer by", justify="right")
    for role, slower in found.interference.items():
        table.add_row(role, f"{slower:.1%}")
    return table
