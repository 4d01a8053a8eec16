"""The shortest useful program: open a session, run code in it, take a file out."""

from __future__ import annotations

import asyncio

from union import sandbox as sb


async def main() -> None:
    """Runs three commands that share one work dir."""
    async with sb.on_device.session(backend="userns") as sbx:
        await sbx.put_bytes("numbers.txt", b"3\n1\n2\n")

        result = await sbx.exec("sort numbers.txt | tee sorted.txt")
        print(result.returncode, result.stdout.split())

        print(await sbx.run_code("print(sum(map(int, open('sorted.txt'))))"), end="")

        print(await sbx.get_bytes("sorted.txt"))


asyncio.run(main())
