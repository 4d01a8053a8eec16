"""A data-analysis loop: a model's code runs cell by cell in one interpreter, and returns a chart.

    python examples/data_analysis.py [--backend userns] [--chart chart.png]

The recorded turns stand for a model. Each cell sees the variables of the cells before it. The
second turn fails, and the third corrects it. Needs pandas and matplotlib.

Prints::

    turn 1: 4 rows
    turn 2: KeyError: 'regions'
    turn 3: a table of 2 regions
    turn 4: a chart (PNG)
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from union import sandbox as sb

SALES = b"region,month,sold\nnorth,1,120\nsouth,1,95\nnorth,2,30\nsouth,2,140\n"
TURNS = (
    "import pandas as pd\nsales = pd.read_csv('sales.csv')\nprint(len(sales), 'rows')",
    "totals = sales.groupby('regions').sold.sum()",
    "totals = sales.groupby('region').sold.sum().to_frame()\ntotals",
    "ax = totals.plot.bar(legend=False)\nax.set_ylabel('sold');",
)


def describe(result: sb.CellResult) -> str:
    """Return one line about a cell."""
    if result.error is not None:
        return f"{result.error.name}: {result.error.value}"
    for shown in result.results:
        if shown.png:
            return "a chart (PNG)"
        if shown.html:
            return f"a table of {shown.html.count('<tr') - 2} regions"
    return result.stdout.strip()


async def main(backend: str) -> bytes:
    """Run the turns and return the chart."""
    chart = b""
    async with sb.on_device.session(backend=backend) as sbx, sbx.context() as ctx:
        await sbx.put_bytes("sales.csv", SALES)
        for number, code in enumerate(TURNS, start=1):
            result = await ctx.run(code, timeout_s=60)
            print(f"turn {number}: {describe(result)}")
            for shown in result.results:
                chart = shown.png or chart
    return chart


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A data-analysis loop that returns a chart.")
    parser.add_argument("--backend", default="userns", help="isolation backend (default: userns)")
    parser.add_argument("--chart", type=Path, default=None, help="file for the chart")
    args = parser.parse_args()
    picture = asyncio.run(main(args.backend))
    if args.chart is not None:
        args.chart.write_bytes(picture)
