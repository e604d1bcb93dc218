"""Bars and lines on a logarithmic axis, as SVG that follows the reader's light or dark theme."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from html import escape

STYLE = """
svg { font: 12px system-ui, "Segoe UI", "DejaVu Sans", sans-serif; color-scheme: light dark }
.paper { fill: #fff } text { fill: #1f2328 } .title { font-size: 16px; font-weight: 600 }
.panel { font-size: 13px; font-weight: 600 }
.value { stroke: #fff; stroke-width: 3px; paint-order: stroke }
.tick { fill: #59636e } .grid { stroke: #d1d9e0; stroke-width: 1 } .one { stroke: #59636e }
.bar { fill: #b6c0ca } .bar.ours { fill: #0969da } .name.ours, .end.ours { font-weight: 700; fill: #0969da }
.line { fill: none; stroke: #8c96a0; stroke-width: 1.5 } .line.ours { stroke: #0969da; stroke-width: 3 }
.dot { fill: #8c96a0 } .dot.ours { fill: #0969da } .end { font-size: 11px }
@media (prefers-color-scheme: dark) {
  .paper { fill: #0d1117 } text { fill: #e6edf3 } .value { stroke: #0d1117 }
  .tick { fill: #9198a1 } .grid { stroke: #2b323b } .one { stroke: #9198a1 }
  .bar { fill: #4d5763 } .bar.ours { fill: #4493f8 } .name.ours, .end.ours { fill: #6cb0ff }
  .line { stroke: #7d8590 } .line.ours { stroke: #4493f8 } .dot { fill: #7d8590 } .dot.ours { fill: #4493f8 }
}
"""
ROW = 18
WIDTH = 440  # of a panel

Panel = dict[str, float]
Lines = dict[str, dict[int, float]]
Text = Callable[[float], str]


def scale(values: Collection[float], begin: float, end: float) -> tuple[Callable[[float], float], list[float]]:
    """Where a value is between ``begin`` and ``end``, and what is marked there: powers of ten, and more if that is but one."""
    low, high = math.log10(min(values)), math.log10(max(values))
    low, high = math.floor(low * 2) / 2, max(math.ceil(high * 2) / 2, math.floor(low * 2) / 2 + 0.5)
    marked = [10.0**power for power in range(math.ceil(low), math.floor(high) + 1)]
    if len(marked) < 2:
        between = (factor * 10.0 ** math.floor(low + decade) for decade in (0, 1) for factor in (1, 2, 3, 5))
        marked = [value for value in between if low <= math.log10(value) <= high]
    return lambda value: begin + (math.log10(value) - low) / (high - low) * (end - begin), marked


def tick(value: float) -> str:
    return f"{value / 1e6:g} M" if value >= 1e6 else f"{value / 1e3:g} k" if value >= 1e3 else f"{value:g}"


def label(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(text)}</text>'


def rule(x1: float, y1: float, x2: float, y2: float, kind: str = "grid") -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'


def bar_panel(title: str, panel: Panel, text: Text, ours: Collection[str]) -> Iterator[str]:
    left, right, bottom = 140, WIDTH - 60, 36 + ROW * len(panel)
    at, marked = scale([*panel.values(), 1.0], left, right)
    yield label(0, 16, title, "panel")
    for value in marked:
        yield rule(at(value), 28, at(value), bottom, "grid one" if value == 1 else "grid")
        yield label(at(value), bottom + 14, tick(value), "tick", "middle")
    for row, (name, value) in enumerate(sorted(panel.items(), key=lambda one: one[1])):
        y, kind = 32 + ROW * row, " ours" if name in ours else ""
        yield label(left - 8, y + 12, name, "name" + kind, "end")
        yield f'<rect x="{left}" y="{y}" width="{max(1, at(value) - left):.1f}" height="{ROW - 5}" rx="2" class="bar{kind}"/>'
        yield label(max(at(value), left) + 5, y + 12, text(value), "value")


def line_panel(title: str, panel: Lines, text: Text, ours: Collection[str]) -> Iterator[str]:
    left, right, top, bottom = 44, WIDTH - 130, 32, 290
    at_y, marked = scale([value for points in panel.values() for value in points.values()], bottom, top)
    at_x, counts = scale([count for points in panel.values() for count in points], left + 8, right)
    yield label(0, 16, title, "panel")
    for value in marked:
        yield rule(left, at_y(value), right, at_y(value))
        yield label(left - 6, at_y(value) + 4, tick(value), "tick", "end")
    for count in counts:
        yield label(at_x(count), bottom + 18, tick(count), "tick", "middle")
    lowest = math.inf
    # The names stand where the lines end, one above the other.
    for name, points in sorted(panel.items(), key=lambda one: -at_y(list(one[1].values())[-1])):
        kind = " ours" if name in ours else ""
        places = [(at_x(count), at_y(value)) for count, value in points.items()]
        yield f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in places)}" class="line{kind}"/>'
        yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{4 if kind else 2.5}" class="dot{kind}"/>' for x, y in places)
        lowest = min(places[-1][1] + 4, lowest - 13)
        yield label(right + 8, lowest, f"{name}  {text(list(points.values())[-1])}", "end" + kind)


def picture(title: str, panels: list[list[str]], height: int) -> str:
    """The panels in two columns."""
    rows = math.ceil(len(panels) / 2)
    width, tall = 2 * WIDTH + 60, 50 + rows * height
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {tall}" width="{width}" height="{tall}">']
    parts += [
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style>",
        f'<rect width="{width}" height="{tall}" class="paper"/>',
    ]
    parts.append(label(20, 28, title, "title"))
    for place, panel in enumerate(panels):
        parts.append(f'<g transform="translate({20 + place % 2 * (WIDTH + 20)} {46 + place // 2 * height})">')
        parts += [*panel, "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


def bars(title: str, panels: dict[str, Panel], text: Text, ours: Collection[str]) -> str:
    shown = {name: panel for name, panel in panels.items() if panel}
    height = 70 + ROW * max(map(len, shown.values()), default=0)
    return picture(title, [list(bar_panel(name, panel, text, ours)) for name, panel in shown.items()], height)


def lines(title: str, panels: dict[str, Lines], text: Text, ours: Collection[str]) -> str:
    shown = {name: panel for name, panel in panels.items() if panel}
    return picture(title, [list(line_panel(name, panel, text, ours)) for name, panel in shown.items()], 330)
