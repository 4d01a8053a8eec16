"""A field that resources do not have."""

from __future__ import annotations

from union import sandbox as sb


async def main() -> None:
    sb.Resources(mem="1Gi")  # mistake
