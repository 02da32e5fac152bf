"""Charts as inline SVG, coloured by the page's own style sheet."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

WIDTH, HEIGHT = 520, 290
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 14, 40
TICKS = 5
TAIL_TICKS = (0.0, 0.5, 0.9, 0.95, 0.99, 0.999, 0.9999)
IN_SECONDS_S = 10.0
"""Where a latency axis reaches that far, it is one of seconds."""
MAX_POINTS = 1500
"""More marks than that are not drawn: nobody sees them, and every browser loads them."""
FOUND = {True: "held", False: "missed", None: "open"}
"""Classes of dots, by whether the SLO held."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartAxis:
    """A range of values, where it lies in the drawing, and how it and its ticks are called."""

    name: str
    low: float
    high: float
    start: float
    end: float
    ticks: tuple[tuple[float, str], ...]

    def at(self, value: float) -> float:
        """Return the coordinate of *value*."""
        share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)


def round_ticks(high: float) -> tuple[float, ...]:
    """Return about five round numbers from 0 to at least *high*."""
    step = 10 ** math.floor(math.log10(high / TICKS))
    step = next(step * m for m in (1, 2, 2.5, 5, 10) if step * m * TICKS >= high * (1 - 1e-9))
    return tuple(step * i for i in range(math.ceil(high / step - 1e-9) + 1))


def _labelled(ticks: Sequence[float], scale: float) -> tuple[tuple[float, str], ...]:
    return tuple((tick, f"{tick * scale:.10g}") for tick in ticks)


def latency_axis(high_s: float) -> ChartAxis:
    """Return a vertical axis from 0 to at least *high_s*, in ms; in s where that is long."""
    name, scale = ("seconds", 1) if high_s >= IN_SECONDS_S else ("ms", 1000)
    return _upright(name, round_ticks(high_s), scale)


def _upright(name: str, ticks: Sequence[float], scale: float) -> ChartAxis:
    """Return a vertical axis over *ticks*."""
    start = HEIGHT - BOTTOM
    labelled = _labelled(ticks, scale)
    return ChartAxis(name=name, low=0, high=ticks[-1], start=start, end=TOP, ticks=labelled)


def _level(name: str, high: float) -> ChartAxis:
    """Return a horizontal axis from 0 to *high*."""
    ticks = _labelled([tick for tick in round_ticks(high) if tick <= high], 1)
    return ChartAxis(name=name, low=0, high=high, start=LEFT, end=WIDTH - RIGHT, ticks=ticks)


def tail_axis(count: int) -> ChartAxis:
    """
    Return a horizontal axis of shares that gives the tail its room.

    A share p lies at -log10(1 - p), so 90 %, 99 % and 99.9 % are equally far apart.
    """
    high = max(_tail(0.995), math.log10(max(count, 2)))
    shares = [share for share in TAIL_TICKS if _tail(share) <= high]
    ticks = tuple((_tail(share), f"{100 * share:.10g}%") for share in shares)
    name = "share of requests within"
    return ChartAxis(name=name, low=0, high=high, start=LEFT, end=WIDTH - RIGHT, ticks=ticks)


def _tail(share: float) -> float:
    return -math.log10(1 - share)


def distribution(
    values_s: Sequence[float],
    *,
    predicted_s: Mapping[float, float],
    foretold_s: Sequence[float] = (),
    limit: tuple[float, float] | None,
) -> str:
    """
    Draw which latency a share of the requests stays within.

    Args:
        values_s: measured.
        predicted_s: share to predicted latency; empty without a prediction.
        foretold_s: predicted, request by request, where they were simulated.
        limit: share and latency promised, the corner the curve has to stay below.

    """
    ordered = sorted(values_s)
    tops = [ordered[-1], *predicted_s.values(), *foretold_s, *([limit[1]] if limit else [])]
    x, y = tail_axis(len(ordered)), latency_axis(1.05 * max(tops))
    parts = [_frame(x, y)]
    if limit:
        parts.append(_corner(x, y, *limit))
    parts.append(_polyline("measured", _curve(ordered, x, y)))
    parts.append(_polyline("predicted", _curve(sorted(foretold_s), x, y)))
    marks = [(x.at(_tail(share)), y.at(value)) for share, value in sorted(predicted_s.items())]
    parts.append(_polyline("predicted", marks))
    parts += [f'<circle class="mark" cx="{a:.1f}" cy="{b:.1f}" r="4"/>' for a, b in marks]
    return _svg(parts, "distribution")


def _curve(ordered: Sequence[float], x: ChartAxis, y: ChartAxis) -> list[tuple[float, float]]:
    """Place values; the k-th of n is what k / n of them stay within, the last lies at infinity."""
    count = len(ordered)
    step = max(1, count // MAX_POINTS)
    places = [k for k in range(count) if k % step == 0 or k > 0.99 * count]
    return [(x.at(min(x.high, _tail((k + 0.5) / count))), y.at(ordered[k])) for k in places]


def over_time(
    points: Sequence[tuple[float, float]],
    *,
    failed_s: Sequence[float],
    window: tuple[float, float],
    limit_s: float | None,
    end_s: float,
) -> str:
    """Draw each request at its scheduled arrival; failed ones as strokes at the top."""
    tops = [value for _, value in points] + ([limit_s] if limit_s else [])
    x, y = _level("scheduled arrival, s", end_s), latency_axis(1.05 * max(tops))
    parts = []
    for start, end in ((0.0, window[0]), (window[1], end_s)):
        width = x.at(end) - x.at(start)
        parts.append(
            f'<rect class="outside" x="{x.at(start):.1f}" y="{TOP}" width="{max(0, width):.1f}"'
            f' height="{HEIGHT - BOTTOM - TOP}"/>'
        )
    parts.append(_frame(x, y))
    if limit_s:
        parts.append(_line("limit", x.start, y.at(limit_s), x.end, y.at(limit_s)))
    step = max(1, len(points) // MAX_POINTS)
    parts += [
        f'<circle class="point" cx="{x.at(t):.1f}" cy="{y.at(v):.1f}" r="2.4">'
        f"<title>{t:.2f} s: {1000 * v:.1f} ms</title></circle>"
        for t, v in points[::step]
    ]
    parts += [_line("failed", x.at(t), TOP, x.at(t), TOP + 10) for t in failed_s[:MAX_POINTS]]
    return _svg(parts, "over time")


def goodput(
    points: Sequence[tuple[float, float, bool | None]],
    marks: Mapping[str, float],
    foreseen: Sequence[tuple[float, float]] = (),
) -> str:
    """
    Draw goodput against offered load.

    Args:
        points: offered and good requests/s of each run, and whether the SLO held;
            `None`: nobody knows.
        marks: where limits are, by the class of their line: `measured`, `predicted`.
        foreseen: offered and good requests/s as predicted, by load.

    """
    loads = [load for load, _, _ in points] + [load for load, _ in foreseen]
    high = 1.1 * max([*loads, *marks.values()])
    x = _level("requests/s offered", high)
    y = _upright("requests/s that met the SLO", round_ticks(high), 1)
    parts = [_frame(x, y)]
    parts.append(_line("ideal", x.at(0), y.at(0), x.at(high), y.at(high)))
    parts.append(_polyline("curve", [(x.at(a), y.at(b)) for a, b, _ in sorted(points)]))
    for name, at in marks.items():
        parts.append(_line(f"mark-{name}", x.at(at), TOP, x.at(at), HEIGHT - BOTTOM))
    parts.append(_polyline("predicted", [(x.at(a), y.at(b)) for a, b in foreseen]))
    parts += [
        _dot("mark", x.at(a), y.at(b), f"{a:.2f}/s offered, {b:.2f}/s good as predicted")
        for a, b in foreseen
    ]
    parts += [
        _dot(FOUND[held], x.at(a), y.at(b), f"{a:.2f}/s offered, {b:.2f}/s good")
        for a, b, held in points
    ]
    return _svg(parts, "goodput against load")


def _dot(name: str, x: float, y: float, said: str) -> str:
    radius = 4 if name == "mark" else 5
    return (
        f'<circle class="{name}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}">'
        f"<title>{said}</title></circle>"
    )


def _svg(parts: Sequence[str], label: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">'
        + "".join(parts)
        + "</svg>"
    )


def _line(name: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{name}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _polyline(name: str, points: Sequence[tuple[float, float]]) -> str:
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
    return f'<polyline class="{name}" points="{path}"/>' if points else ""


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'


def _frame(x: ChartAxis, y: ChartAxis) -> str:
    """Draw grid, ticks and names of both axes."""
    parts = [_line("grid", x.start, y.at(v), x.end, y.at(v)) for v, _ in y.ticks]
    parts += [_text(x.start - 8, y.at(v) + 4, name, "end") for v, name in y.ticks]
    parts += [_line("grid", x.at(v), TOP, x.at(v), HEIGHT - BOTTOM) for v, _ in x.ticks]
    parts += [_text(x.at(v), HEIGHT - BOTTOM + 17, name, "middle") for v, name in x.ticks]
    parts.append(_text((x.start + x.end) / 2, HEIGHT - 4, x.name, "middle"))
    middle = (y.start + y.end) / 2
    turned = f'transform="rotate(-90 14 {middle:.1f})"'
    parts.append(f'<text x="14" y="{middle:.1f}" text-anchor="middle" {turned}>{y.name}</text>')
    return "".join(parts)


def _corner(x: ChartAxis, y: ChartAxis, share: float, limit_s: float) -> str:
    """Draw the promise: up to this share, latencies stay below this limit."""
    right, top = x.at(_tail(share)), y.at(limit_s)
    return (
        f'<rect class="beyond" x="{x.start:.1f}" y="{TOP}" width="{right - x.start:.1f}"'
        f' height="{max(0.0, top - TOP):.1f}"/>'
        f'<polyline class="limit" points="{x.start:.1f},{top:.1f} {right:.1f},{top:.1f}'
        f' {right:.1f},{TOP}"/>'
    )
