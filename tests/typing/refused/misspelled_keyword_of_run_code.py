"""An argument of run_code() that is spelled otherwise."""

from __future__ import annotations

from union import sandbox as sb


async def main(sbx: sb.Session) -> None:
    await sbx.run_code("1", timeout=5)  # mistake
