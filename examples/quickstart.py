r"""The shortest useful program: open a session, run code in it, fetch a file.

    python examples/quickstart.py [--backend userns]

Prints::

    0 ['1', '2', '3']
    6
    b'1\n2\n3\n'
"""

from __future__ import annotations

import argparse
import asyncio

from union import sandbox as sb


async def main(backend: str) -> None:
    """Run commands that share one work dir."""
    async with sb.on_device.session(backend=backend) as sbx:
        await sbx.put_bytes("numbers.txt", b"3\n1\n2\n")

        result = await sbx.exec("sort numbers.txt | tee sorted.txt")
        print(result.returncode, result.stdout.split())

        print(await sbx.run_code("print(sum(map(int, open('sorted.txt'))))"), end="")

        print(await sbx.get_bytes("sorted.txt"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="The shortest useful program.")
    parser.add_argument("--backend", default="userns", help="isolation backend (default: userns)")
    asyncio.run(main(parser.parse_args().backend))
