"""Ask before tracked files are rewritten: the page of the benchmarks, its chart and the numbers.

`make bench` asks once, at the start, and passes the answer to each program that measures. Without a
terminal nothing is asked and nothing tracked is changed, unless `--write` is passed.
"""

from __future__ import annotations

import argparse
import sys

FILES = "docs/benchmarks.md and bench/results"


def add_option(parser: argparse.ArgumentParser) -> None:
    """Add `--write` and `--no-write`."""
    parser.add_argument(
        "--write",
        action=argparse.BooleanOptionalAction,
        help=f"after a complete run, rewrite {FILES}; without it, ask on a terminal",
    )


def may_write(*, given: bool | None) -> bool:
    """Return whether tracked files may be rewritten; ask if that is possible and undecided."""
    if given is not None:
        return given
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        print(
            f"bench: {FILES} stay as they are; `make bench WRITE=1` rewrites them", file=sys.stderr
        )
        return False
    print(f"After the run, rewrite {FILES}? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in {"y", "yes"}


def main() -> int:
    """Print the answer as an option."""
    parser = argparse.ArgumentParser(prog="python -m bench.keep", description=__doc__)
    add_option(parser)
    print("--write" if may_write(given=parser.parse_args().write) else "--no-write")
    return 0


if __name__ == "__main__":
    sys.exit(main())
