"""An argument of a session that is spelled otherwise."""

from __future__ import annotations

from union import sandbox as sb


async def main() -> None:
    sb.on_device.session(workdir="/srv")  # mistake
