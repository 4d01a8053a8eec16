"""A script type that does not exist."""

from __future__ import annotations

from union import sandbox as sb


async def main(sbx: sb.Session) -> None:
    await sbx.exec("true", script_type="bash")  # mistake
