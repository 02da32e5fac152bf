"""A long prompt on an idle system as tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minicluster.pages.page import Section, Text
from minicluster.units import seconds
from sizing.planner.studies.long_context import (
    SIZES,
    ComputeRule,
    CostDifference,
    LongPrompt,
    Timed,
    preferences,
)
from sizing.report.tables import table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from minicluster.plan import Inputs

SPENT = {
    "matrix multiplications": "multiply",
    "attention": "attention",
    "collectives": "collectives",
}
"""Headings of the groups of terms of a token that are shown."""


def long_context_sections(
    inputs: Inputs, found: Sequence[LongPrompt], rule: ComputeRule
) -> Iterator[Section]:
    """Yield the whole answer: the system, the three tables, and the lines below them."""
    yield Section(f"{inputs.model.id}, {inputs.model.weight_dtype}, on {inputs.gpu.name}", ())
    yield long_context_table(found, inputs.scenario.slo.ttft_s)
    yield token_table(found[0])
    yield answers_table(found, rule, inputs.cluster.max_gpus)
    yield Section("", tuple(map(Text, long_context_lines(inputs, found, rule))))


def long_context_table(found: Sequence[LongPrompt], limit_s: float) -> Section:
    """Return TTFT by layout and length; values that hold the limit are marked."""
    rows = []
    for layouts in zip(*(each.layouts for each in found), strict=True):
        cells = [
            f"{seconds(each.ttft_s)}{'*' if each.ttft_s <= limit_s else ' '}"
            if each.fits
            else "no memory"
            for each in layouts
        ]
        tpot = f"{layouts[0].tpot_s * 1e3:.1f} - {layouts[-1].tpot_s * 1e3:.1f} ms"
        rows.append((layouts[0].layout, str(layouts[0].gpus), *cells, tpot))
    return table(
        f"TTFT of one prompt in an empty system; * within {seconds(limit_s)}",
        ("layout", "GPUs", *(f"{each.tokens:,}" for each in found), "TPOT"),
        rows,
        details=("GPUs",),
        notes=["TPOT: of one sequence after the shortest and the longest prompt"],
    )


def answers_table(found: Sequence[LongPrompt], rule: ComputeRule, budget: int) -> Section:
    """Return the GPUs needed by the rule and by the model."""
    rows = []
    for each in found:
        fewest = each.fewest
        model = (f"> {budget}", "", "")
        if fewest:
            model = (str(fewest.gpus), seconds(fewest.ttft_s), fewest.layout)
        rows.append(
            (
                f"{each.tokens:,}",
                f"{sum(each.flops.values()) / 1e15:.2f}",
                f"{each.rule.exact:.1f}",
                f"> {rule.most_gpus}" if each.rule.gpus is None else str(each.rule.gpus),
                *model,
            )
        )
    heads = ("tokens", "PFLOP", f"{rule.name}: exactly", rule.name, "model", "TTFT", "layout")
    return table("GPUs needed", heads, rows, words=("layout",))


def token_table(found: LongPrompt) -> Section:
    """Return the terms of one token by layout, after one prompt length."""
    libraries = sorted({name for each in found.layouts for name in each.tpot_by_library_s})
    rows = []
    for each in found.layouts:
        named = [each.tpot_parts_s[name] for name in SPENT]
        others = (each.tpot_by_library_s.get(name) for name in libraries)
        spent = (*named, each.tpot_s - sum(named), each.tpot_s, *others)
        cells = ("" if value is None else f"{value * 1e3:.1f}" for value in spent)
        rows.append((each.layout, *cells))
    heads = ("layout", *SPENT.values(), "rest", "TPOT", *(f"by {name}" for name in libraries))
    title = f"Decode of one sequence after {found.tokens:,} tokens, ms a token"
    return table(title, heads, rows)


def long_context_lines(
    inputs: Inputs, found: Sequence[LongPrompt], rule: ComputeRule
) -> Iterator[str]:
    """Yield differences, preferences and assumptions beside the tables."""
    for each in found:
        if each.difference is not None:
            yield f"{each.tokens:,} tokens: {_why(each.difference, rule)}"
    for size, first, token in preferences(found[0]):
        yield from _preferred(found[0], size, (first, token))
    yield (
        f"Preset {rule.name}: {rule.compute_fraction:.0%} of the dense peak, compute only"
        f"{', sizes in powers of two' if rule.powers_of_two else ''}, up to {rule.most_gpus} GPUs"
    )
    assumed = inputs.scenario.model.assumed_context_tokens
    if assumed is not None:
        yield f"Assumption of the scenario: {inputs.model.id} serves {assumed:,} tokens"


def _preferred(found: LongPrompt, size: int, best: tuple[Timed, Timed]) -> Iterator[str]:
    """Return the fastest layout of a size for each phase, and the term that decides decode."""
    first, token = best
    where = f"On {size} GPUs after {found.tokens:,} tokens"
    if first.layout == token.layout:
        yield f"{where} prefill and decode are both fastest on {first.layout}"
    else:
        yield f"{where} prefill is fastest on {first.layout}, decode on {token.layout}"
    others = [each for each in found.layouts if each.gpus == size and each is not token]
    other = min(others, key=lambda each: each.tpot_s)
    yield (
        f"Decode on {other.layout} takes {seconds(other.tpot_s)}, on {token.layout}"
        f" {seconds(token.tpot_s)}: {_decides(other, token)}"
    )
    for each in others:
        for library, faster_s in each.tpot_by_library_s.items():
            if faster_s < token.tpot_s:
                yield (
                    f"Were {library} to sum between HB domains in place of NCCL, decode would"
                    f" prefer {each.layout}: {seconds(faster_s)}"
                )


def _decides(slower: Timed, faster: Timed) -> str:
    """Return the term by which a layout loses most, and the one by which it gains most."""
    more = {name: each - faster.tpot_parts_s[name] for name, each in slower.tpot_parts_s.items()}
    worst, best = max(more, key=lambda name: more[name]), min(more, key=lambda name: more[name])
    lost = f"{seconds(more[worst])} more for {worst}"
    return lost if more[best] >= 0 else f"{lost}, {seconds(-more[best])} less for {best}"


def _why(difference: CostDifference, rule: ComputeRule) -> str:
    if difference.term == SIZES:
        return f"the model needs fewer GPUs because {rule.name} counts in powers of two"
    excess_s = difference.excess_s[difference.term]
    return (
        f"the difference is the {difference.term}, {seconds(abs(excess_s))}"
        f" {'more' if excess_s > 0 else 'less'} than by {rule.name} on {difference.at.gpus} GPUs,"
        f" where {difference.at.layout} takes {seconds(difference.at.ttft_s)}"
    )
