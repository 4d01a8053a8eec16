"""Python targets: ``python -m tests.fuzz.drive TARGET,TARGET... blind SEED RUNS KEEP``, or
``... TARGET atheris LIBFUZZER-ARGUMENT...`` for a search that is guided by coverage.

Blind mutation is the same on every machine and begins at once, so the tests use that. It prints
how many inputs each target was given.
"""

from __future__ import annotations

import itertools
import logging
import random
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MOST_BYTES: Final = 4096
SLOW: Final = {
    "hosts": 2,
    "sizes": 4,
    "http_proxy": 4,
    "wire_server": 4,
    "wire_client": 2,
    "replay": 4,
}
"""Targets of which there is time for only one run in so many."""
ODD: Final = (
    b"\0", b"\xff", b"\r\n", b"\r\n\r\n", b".", b"..", b"/", b":", b"%", b"@", b"*", b"0", b"-1",
    b"9" * 20, b"1e999", b"null", b"[]", b"{}", b"true", b"\xe3\x80\x82", b"\xc3\x9f",
    b"\xed\xb2\x80", b"\xf0\x9d\x9b\x93", b"\xe1\xba\x9e", b"\x7f\xff\xff\xff", b"\x80\0\0\0",
    b"\xff" * 8,
)  # fmt: skip


def known_inputs(name: str) -> list[bytes]:
    """What broke the target once, its corpus, and its seeds."""
    from tests.fuzz import archives, seeds

    folder = seeds.REGRESSIONS / name
    broke = [file.read_bytes() for file in sorted(folder.iterdir())] if folder.is_dir() else []
    return [*broke, *archives.load(name), *seeds.seeds()[name]]


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


def blind(
    target: Callable[[bytes], None], known: list[bytes], *, seed: int, runs: int, keep: Path
) -> int:
    """Runs what is known as it is, then mutations; how many, or 0 when one failed and was kept."""
    changed = itertools.islice(mutations(known, seed), runs)
    for data in itertools.chain(known, changed):
        try:
            target(data)
        except BaseException:  # noqa: BLE001 - whatever it is, it is what is looked for
            keep.parent.mkdir(parents=True, exist_ok=True)
            keep.write_bytes(data)
            traceback.print_exc()
            print(f"{keep.name}: {data[:400]!r}", file=sys.stderr)
            return 0
    return len(known) + runs


def guided(name: str, arguments: list[str]) -> None:
    """Hands the target to libFuzzer, which counts branches in the package; does not return."""
    import atheris

    with atheris.instrument_imports(include=["union.sandbox"]):
        from tests.fuzz.targets import PYTHON
    atheris.Setup([sys.argv[0], *arguments], PYTHON[name])
    atheris.Fuzz()


def main() -> int:
    """Reads the command line."""
    names, engine, *arguments = sys.argv[1:]
    logging.disable()
    if engine == "atheris":
        guided(names, arguments)
    from tests.fuzz.targets import PYTHON

    seed, runs, keep = arguments
    broken = False
    for name in names.split(","):
        most = int(runs) // SLOW.get(name, 1)
        kept = Path(keep) / name
        done = blind(PYTHON[name], known_inputs(name), seed=int(seed), runs=most, keep=kept)
        print(name, done, flush=True)
        broken |= done == 0
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())
