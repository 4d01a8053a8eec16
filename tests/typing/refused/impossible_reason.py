"""A comparison with a reason that does not exist."""

# pyright: reportUnnecessaryComparison=error

from __future__ import annotations

from union import sandbox as sb


async def main(sbx: sb.Session) -> None:
    if (await sbx.exec("true")).termination_reason == "timed-out":  # mistake
        print()
