"""The running cost of a plan: watts, joules and US dollars per token."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING

from minicluster.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from minicluster.plan import Inputs, Plan

YOURS = "yours"
DATASHEET = "datasheet, GPUs alone"


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """
    Power, energy and price; `None` where neither catalog nor scenario has the number.

    Attributes:
        power_w: all GPUs at full power.
        power_source: `yours` (cluster.power_w_per_gpu) or the GPU's datasheet.
        joules_per_output_token: all power, shared by the tokens of the planned load.
        usd_per_hour: GPUs and, with cluster.energy_usd_per_kwh, energy.
        usd_per_million_output_tokens: at the planned load.
        price_source: `yours`, or the lists of the catalog that it is the median of.
    """

    power_w: float | None
    power_source: str | None
    joules_per_output_token: float | None
    usd_per_hour: float | None
    usd_per_million_output_tokens: float | None
    price_source: str | None


def running(plan: Plan) -> Running:
    """Return the running cost of a plan at its load, spare replicas included."""
    return running_of(plan.inputs, plan.gpus_by_kind, plan.prediction.output_tokens_per_s)


def running_of(inputs: Inputs, gpus: Mapping[str, int], output_tokens_per_s: float) -> Running:
    """
    Return the running cost of GPUs, counts by kind, that give so many tokens/s.

        J/token = W / (rate E[o]);  $/Mtok = 10^6 ($/h + kW $/kWh) / (3600 rate E[o])
        (docs/model.md, eq. E2)

    Source:
        Definitions; every GPU draws full power all the time, and is paid for all the time.

    Ignores:
        Power that idle GPUs save; hosts, switches and cooling where the scenario does not give
        power at the wall; prompts, whose price is in that of the answers.
    """
    own = inputs.scenario.cluster.power_w_per_gpu
    power_w = inputs.power_w(gpus)
    usd = inputs.usd_per_hour(gpus)
    return Running(
        power_w=power_w,
        power_source=None if power_w is None else DATASHEET if own is None else YOURS,
        joules_per_output_token=None if power_w is None else power_w / output_tokens_per_s,
        usd_per_hour=usd,
        usd_per_million_output_tokens=None
        if usd is None
        else 1e6 * usd / (3600 * output_tokens_per_s),
        price_source=None if usd is None else price_source(inputs, gpus),
    )


def price_source(inputs: Inputs, gpus: Iterable[str], today: date | None = None) -> str:
    """
    Say where the prices of GPUs come from, and of when; lists older than a year are told apart.

    Args:
        today: the date; absent: that of this machine.
    """
    named = set(gpus)
    listed = [each for each in inputs.list_prices if each.gpu in named]
    said = [YOURS] if named - {each.gpu for each in listed} else []
    year_ago = (today or datetime.now(tz=UTC).date()) - timedelta(days=365)
    for each in listed:
        low, high = each.lowest_usd_per_gpu_hour, each.highest_usd_per_gpu_hour
        dates = " to ".join(dict.fromkeys([each.oldest, each.newest]))
        what = f"median of {each.lists} list prices, ${low:,.2f} to ${high:,.2f}"
        if each.lists == 1:
            what = f"the one list price, ${low:,.2f}"
        old = ", OLDER THAN A YEAR" if date.fromisoformat(each.oldest) < year_ago else ""
        said.append(f"{each.gpu}: {what}, {dates}{old}")
    return "; ".join(said)


def require_price(inputs: Inputs, scenario: str) -> None:
    """
    Refuse to rank by dollars without prices.

    Raises:
        InputError: how to give one.
    """
    for kind in inputs.kinds:
        if inputs.price_usd_per_hour({kind: 1}) is None:
            raise InputError(
                f"{scenario}: cluster.price_usd_per_gpu_hour",
                None,
                f"what you pay for an {kind} and hour, in US dollars: there is no default price",
                "--set cluster.price_usd_per_gpu_hour=PRICE, or the list prices of the catalog:"
                " --set cost.prices=catalog",
            )
