"""What a plan was compared and simulated with, and what keeps it from being deployed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minicluster.plan import Plan


def confidence_lines(plan: Plan) -> list[str]:
    """Say under which step times it holds, what was not chosen, and the rule that it breaks."""
    lines = []
    sure = plan.confidence
    if sure is not None and sure.requests:
        lines.append(
            f"Simulated with prefill steps {sure.prefill_factor:.2f} and decode steps"
            f" {sure.decode_factor:.2f} times as long as predicted; holds as well with TTFT"
            f" {sure.ttft_factor:.2f} and TPOT {sure.tpot_factor:.2f} times as long as predicted"
        )
        if sure.other_pools:
            lines.append("Compared: " + sure.other_pools)
    spares = {pool.role: pool.spare_replicas for pool in plan.pools if pool.spare_replicas}
    if spares:
        each = ", ".join(f"{count} {role}" for role, count in spares.items())
        lines.append(f"Spare replicas that the SLO does not need: {each}")
    if not plan.deployable.ok:
        lines.append(f"Not deployable by {plan.deployable.profile}: {plan.deployable.rule_broken}")
    return lines
