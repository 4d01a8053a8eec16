"""One Python target: ``python -m tests.fuzz.drive TARGET blind SEED RUNS KEEP FILE-OR-FOLDER...``,
or ``... TARGET atheris LIBFUZZER-ARGUMENT...`` for a search that is guided by coverage.

Blind mutation is the same on every machine and begins at once, so the tests use that.
"""

from __future__ import annotations

import logging
import random
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MOST_BYTES: Final = 4096
ODD: Final = (
    b"\0", b"\xff", b"\r\n", b"\r\n\r\n", b".", b"..", b"/", b":", b"%", b"@", b"*", b"0", b"-1",
    b"9" * 20, b"1e999", b"null", b"[]", b"{}", b"true", b"\xe3\x80\x82", b"\xc3\x9f", b"\xed\xb2\x80",
    b"\xf0\x9d\x9b\x93", b"\xe1\xba\x9e", b"\x7f\xff\xff\xff", b"\x80\0\0\0", b"\xff" * 8,
)  # fmt: skip


def inputs(places: list[str]) -> list[bytes]:
    """The files that are named, and those of the folders that are."""
    files = [Path(place) for place in places]
    files += [file for folder in files if folder.is_dir() for file in sorted(folder.iterdir())]
    return [file.read_bytes() for file in files if file.is_file()]


def mutations(known: list[bytes], seed: int) -> Iterator[bytes]:
    """Inputs without end: known ones with pieces changed, moved, cut out and mixed."""
    rng = random.Random(seed)
    while True:
        data = bytearray(rng.choice(known))
        for _ in range(1 + rng.getrandbits(2)):
            at = rng.randrange(len(data) + 1)
            match rng.getrandbits(3):
                case 0 | 1 if data:
                    data[min(at, len(data) - 1)] = rng.getrandbits(8)
                case 2:
                    data[at:at] = rng.choice(ODD)
                case 3:
                    data[at : at + rng.getrandbits(4)] = rng.choice(ODD)
                case 4:
                    del data[at : at + 1 + rng.getrandbits(4)]
                case 5:
                    other = rng.choice(known)
                    begin = rng.randrange(len(other) + 1)
                    data[at:] = other[begin:]
                case 6 if data:
                    data[min(at, len(data) - 1)] ^= 1 << rng.getrandbits(3)
                case _:
                    piece = data[at : at + 1 + rng.getrandbits(5)]
                    data[at:at] = piece
        yield bytes(data[:MOST_BYTES])


def blind(target: Callable[[bytes], None], arguments: list[str]) -> int:
    """Runs what is known as it is, then mutations; says how many, keeps the first that fails."""
    seed, runs, keep, *places = arguments
    known = inputs(places)
    done = 0
    changed = mutations(known, int(seed))
    for data in known:
        if not _holds(target, data, keep):
            return 1
        done += 1
    for _ in range(int(runs)):
        if not _holds(target, next(changed), keep):
            return 1
        done += 1
    print(done)
    return 0


def _holds(target: Callable[[bytes], None], data: bytes, keep: str) -> bool:
    try:
        target(data)
    except BaseException:  # noqa: BLE001 - whatever it is, it is what is looked for
        Path(keep).parent.mkdir(parents=True, exist_ok=True)
        Path(keep).write_bytes(data)
        traceback.print_exc()
        print(f"input: {data[:400]!r}\nkept: {keep}", file=sys.stderr)
        return False
    return True


def guided(name: str, arguments: list[str]) -> None:
    """Hands the target to libFuzzer, which counts branches in the package; does not return."""
    import atheris

    with atheris.instrument_imports(include=["union.sandbox"]):
        from tests.fuzz.targets import PYTHON
    atheris.Setup([sys.argv[0], *arguments], PYTHON[name])
    atheris.Fuzz()


def main() -> int:
    """Reads the command line."""
    name, engine, *arguments = sys.argv[1:]
    logging.disable()
    if engine == "atheris":
        guided(name, arguments)
    from tests.fuzz.targets import PYTHON

    return blind(PYTHON[name], arguments)


if __name__ == "__main__":
    sys.exit(main())
