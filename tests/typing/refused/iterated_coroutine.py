"""A coroutine is iterated."""

from __future__ import annotations

from union import sandbox as sb


async def main(sbx: sb.Session) -> None:
    print([entry.path for entry in sbx.list_dir()])  # mistake
