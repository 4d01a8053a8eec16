"""An attribute of a session that was not awaited."""

from __future__ import annotations

from union import sandbox as sb


async def main() -> None:
    print(sb.on_device.session().open().work_dir)  # mistake
