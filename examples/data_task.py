"""A data task in several turns: stage a table, analyse it, fix the code from its traceback.

    python examples/data_task.py [--backend userns]

The files of a session persist between turns, so each try continues after the last failure. A list
of tries replaces the model, which would write the code. The exit code and the traceback from the
sandbox decide whether another try is needed.

Prints::

    staged sales.csv: 142 bytes
    try 1: ValueError: could not convert string to float: '1,310.25'
    try 2: ValueError: could not convert string to float: ''
    try 3: 5 rows used, 1 skipped
    North   2184.50
    South   2416.00
    West     640.00
    fetched report.json: best is South
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys

from union import sandbox as sb

SALES = """\
region,month,revenue,seller
North,1,1204.50,Ann
North,2,980.00,Ben
South,1,"1,310.25",Cem
South,2,1105.75,Cem
West,1,640.00,Dora
West,2,,Dora
"""

ANALYSIS = """\
import csv
import json


def amount(text):
    return NUMBER


totals, used, skipped = {}, 0, 0
for row in csv.DictReader(open("sales.csv")):
    value = amount(row["revenue"])
    if value is None:
        skipped += 1
        continue
    used += 1
    totals[row["region"]] = totals.get(row["region"], 0) + value
print(f"{used} rows used, {skipped} skipped")
json.dump({"best": max(totals, key=totals.get), "totals": totals}, open("report.json", "w"))
"""

# The code that a model would write after it has read the previous traceback.
TRIES = (
    "float(text)",
    'float(text.replace(",", ""))',
    'float(text.replace(",", "")) if text else None',
)


def progress(text: str) -> None:
    """Print progress on a terminal only."""
    if sys.stderr.isatty():
        print(f"\x1b[2m{text} ...\x1b[0m", file=sys.stderr)


async def analyse(sbx: sb.Session) -> None:
    """Try until one succeeds. A failed try is a result with a traceback, not an exception."""
    for number, expression in enumerate(TRIES, start=1):
        progress(f"running try {number}")
        await sbx.put_bytes("analysis.py", ANALYSIS.replace("NUMBER", expression).encode())
        result = await sbx.exec("python analysis.py", timeout_s=30)
        if result.ok:
            print(f"try {number}: {result.stdout}", end="")
            return
        print(f"try {number}: {result.stderr.strip().splitlines()[-1]}")
    raise SystemExit("no try worked")


async def main(backend: str) -> None:
    """Stages, analyses, fetches."""
    progress("opening a session")
    async with sb.on_device.session(backend=backend) as sbx:
        size = await sbx.put_bytes("sales.csv", SALES.encode())
        print(f"staged sales.csv: {size} bytes")

        await analyse(sbx)

        # The result is untrusted: its size is limited, and it is parsed but never executed.
        report = json.loads(await sbx.get_bytes("report.json", max_bytes=100_000))
        for region, total in report["totals"].items():
            print(f"{region:<6} {total:8.2f}")
        print(f"fetched report.json: best is {report['best']}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A data task in several turns.")
    parser.add_argument("--backend", default="userns", help="isolation backend (default: userns)")
    asyncio.run(main(parser.parse_args().backend))
