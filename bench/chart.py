"""Draw the results as bars on a logarithmic scale, where 1 is the time without a sandbox."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING

from bench.contenders import BARE, OURS
from bench.report import facts, names

if TYPE_CHECKING:
    from bench.report import Results

SHOWN = {
    "run_true": 'run("true")',
    "run_code": 'run_code("print(2+2)")',
    "run_true_x4": 'run("true"), 4 at once',
    "run_code_x4": "run_code, 4 at once",
    "open": "open a session (bare: python -c pass)",
}
LEFT, WIDTH, BAR, GAP, TOP = 210, 760, 15, 26, 62
TITLE = "Time, as a multiple of doing it without a sandbox"
HOW_TO_READ = "Lower is better. Dashed: without a sandbox. Logarithmic scale."
# Readable on light and dark pages.
COLOURS = ("#e4572e", "#4c78a8", "#72a0c1", "#7f9c5a", "#9d7bb0", "#b08f5a")
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #444 }
.title { font-size: 15px; font-weight: 600 }
.group { font-weight: 600 }
.small { font-size: 10px }
.mark { text-anchor: middle }
.line { stroke: #8884; stroke-width: 1 }
.bare { stroke: #888; stroke-width: 1.5; stroke-dasharray: 4 3 }
@media (prefers-color-scheme: dark) { text { fill: #ccc } }
"""


def slowness(measure: Results, name: str) -> float:
    """Return the multiple of the bare time; rates are inverted, so that less is always better."""
    ratio: float = measure["results"][name]["ratio"]
    return ratio if measure["unit"] == "ms" else 1 / ratio


class _Scale:
    """Return the position of a ratio on the page."""

    def __init__(self, ratios: list[float]) -> None:
        self.low = math.floor(math.log10(min(1.0, *ratios)))
        self.high = math.ceil(math.log10(max(1.0, *ratios)))
        self.high = max(self.high, self.low + 1)

    def x(self, ratio: float) -> float:
        share = (math.log10(ratio) - self.low) / (self.high - self.low)
        return LEFT + share * (WIDTH - LEFT - 60)

    def marks(self) -> list[float]:
        found = [10.0**e * step for e in range(self.low, self.high) for step in (1, 2, 5)]
        return [*found, 10.0**self.high]


def svg(results: Results) -> str:
    """Return the chart; it has no bars if none of its measures was run."""
    shown = [m for name in SHOWN for m in results["measures"] if m["name"] == name]
    colours = dict(zip(names(results), [*COLOURS, *["#888"] * 9], strict=False))
    scale = _Scale([slowness(m, n) for m in shown for n in m["results"]] or [1.0])
    parts: list[str] = []
    y = TOP
    for measure in shown:
        title = escape(SHOWN[measure["name"]])
        parts.append(f'<text class="group" x="12" y="{y + 2}">{title}</text>')
        y += 10
        for name in (n for n in measure["results"] if n != BARE):
            parts += _bar(name, slowness(measure, name), colours[name], y, scale)
            y += BAR + 3
        y += GAP
    return _page(results, [*_axis(scale, y), *parts], height=y + 34)


def _bar(name: str, ratio: float, colour: str, y: int, scale: _Scale) -> list[str]:
    begin, end = sorted((scale.x(1), scale.x(ratio)))
    wide = max(1.5, end - begin)
    weight = ' font-weight="600"' if name == OURS else ""
    beside = max(end, scale.x(1)) + 6
    return [
        f'<text x="{LEFT - 8}" y="{y + 12}" text-anchor="end"{weight}>{escape(name)}</text>',
        f'<rect x="{begin:.1f}" y="{y}" width="{wide:.1f}" height="{BAR}" fill="{colour}"/>',
        f'<text x="{beside:.1f}" y="{y + 12}"{weight}>{ratio:.2f}</text>',
    ]


def _axis(scale: _Scale, bottom: int) -> list[str]:
    parts = []
    for ratio in scale.marks():
        x, kind = scale.x(ratio), "bare" if ratio == 1 else "line"
        parts += [
            f'<line class="{kind}" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 10}" y2="{bottom - GAP}"/>',
            f'<text class="small mark" x="{x:.1f}" y="{bottom - 10}">{ratio:g}</text>',
        ]
    return parts


def _page(results: Results, parts: list[str], *, height: int) -> str:
    about = escape(facts(results).partition(" Compared with:")[0])
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
            f"<title>{TITLE}</title><style>{STYLE}</style>",
            f'<text class="title" x="12" y="24">{TITLE}</text>',
            f'<text class="small" x="12" y="40">{HOW_TO_READ}</text>',
            *parts,
            f'<text class="small" x="12" y="{height - 8}">{about}</text>',
            "</svg>\n",
        ]
    )
