"""The SLO guard: admits what will keep its SLO, learns what its forecasts miss."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minicluster.errors import InputError
from minicluster.routing import chooser
from serving.admission.inflight import InflightRequest, LiveState, lanes_of
from serving.admission.policy import AdmissionForecast, Margin, RequestCost, Shed, decide, work_s

if TYPE_CHECKING:
    from collections.abc import Mapping

    from serving.protocol.endpoint_config import EndpointConfig

GUARD = "MINICLUSTER_GUARD"
"""Environment variable: `off` admits everything, to measure what pools can do by themselves."""

WINDOW = 400
"""Requests whose misses make the margin: four of them lie above its p99."""

LEARNED = 20
"""Requests before a margin is learned; the plan's own error stands in for it until then."""


def read_guard(environment: Mapping[str, str]) -> bool:
    """Return whether the guard sheds; raises InputError for anything but `on` and `off`."""
    given = environment.get(GUARD, "on")
    if given not in {"on", "off"}:
        raise InputError(GUARD, given, "on or off")
    return given == "on"


class ResidualWindow:
    """By how much the last requests exceeded their forecasts."""

    def __init__(self, share: float) -> None:
        """*share* of the requests exceeded it by less than `at_share`."""
        self._share = share
        self._last: deque[float] = deque(maxlen=WINDOW)
        self._at_share = self._typical = 0.0
        self._added = 0

    def add(self, missed_s: float) -> None:
        """Note a request; sorts only every few of them, for requests pay for it."""
        self._last.append(missed_s)
        self._added += 1
        if len(self._last) <= LEARNED or self._added % 8 == 0 or missed_s > self._at_share:
            ranked = sorted(self._last)
            self._at_share = ranked[min(len(ranked) - 1, int(self._share * len(ranked)))]
            self._typical = ranked[len(ranked) // 2]

    def margin_s(self, untaught_s: float) -> float:
        """Return what to add to a forecast; *untaught_s* as long as too little is known."""
        return max(0.0, self._at_share) if len(self._last) >= LEARNED else untaught_s

    @property
    def typical_s(self) -> float:
        """Return what half of the requests exceeded their forecasts by, if they did."""
        return max(0.0, self._typical) if len(self._last) >= LEARNED else 0.0


@dataclass(slots=True)
class AdmittedRequest:
    """An admitted request: its stay, what was forecast (`None`: no plan), when it came."""

    stay: InflightRequest
    forecast: AdmissionForecast | None

    @property
    def domain(self) -> str:
        """The domain that answers."""
        return self.stay.lane.answers


class AdmissionController:
    """Admission for one front door, by `serving.admission.policy` and the live state."""

    def __init__(
        self, front: EndpointConfig, seed: int | None = None, *, sheds: bool = True
    ) -> None:
        """Start with idle books; *seed* of the choice among domains; without *sheds*, it admits."""
        self.sheds = sheds
        self.state = LiveState(lanes_of(front))
        self._front = front
        self._rng = random.Random(seed)  # noqa: S311  (load balancing, not a secret)
        self._choose = chooser("power-of-two")
        share = 0.99 if front.slo is None else front.slo.level
        self._ttft, self._tpot = ResidualWindow(share), ResidualWindow(share)
        self._turn = 0

    @property
    def margin(self) -> Margin:
        """What is added to forecasts now."""
        front = self._front
        if front.slo is None or front.step_model is None:
            return Margin()
        step, pace_s = front.step_model, front.slo.per_token_s or 0.0
        return Margin(
            ttft_s=self._ttft.margin_s(step.prefill.error_fraction * front.slo.ttft_s),
            tpot_s=self._tpot.margin_s(step.decode.error_fraction * pace_s),
            typical_ttft_s=self._ttft.typical_s,
            typical_tpot_s=self._tpot.typical_s,
        )

    def enter(self, asked: RequestCost) -> AdmittedRequest | Shed:
        """Admit a request into a domain, or shed it, if there is a plan to shed by."""
        state, front = self.state, self._front
        lane = state.lanes[self._choose(state.per_replica(), self._rng, self._turn)]
        self._turn += 1
        if front.slo is None or front.step_model is None:
            return AdmittedRequest(state.enter(asked, lane, 1.0), None)
        load = state.load(lane)
        found = (
            decide(front.step_model, front.slo, asked, load, self.margin) if self.sheds else None
        )
        if isinstance(found, Shed):
            return found
        work = work_s(front.step_model, asked, load)
        return AdmittedRequest(state.enter(asked, lane, work), found)

    def begin(self, visit: AdmittedRequest, ttft_s: float) -> None:
        """Note a first token, *ttft_s* after the request came."""
        self.state.begin(visit.stay)
        if visit.forecast is not None:
            self._ttft.add(ttft_s - visit.forecast.ttft_s)

    def leave(self, visit: AdmittedRequest, tpot_s: float | None) -> None:
        """Note the end of a request, and its pace if it had one."""
        self.state.leave(visit.stay)
        if visit.forecast is not None and tpot_s is not None:
            self._tpot.add(tpot_s - visit.forecast.tpot_s)
