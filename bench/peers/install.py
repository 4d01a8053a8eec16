"""`make bench-peers`: a virtualenv for each peer, so that none can disturb another or us."""

from __future__ import annotations

import subprocess
import sys

from bench.contenders import PEERS

# With what each needs to run: `unionai-sandbox` imports an extra and calls `uv`.
PACKAGES = {
    "unionai-sandbox": ("unionai-sandbox[flyte]", "uv"),
    "sandlock": ("sandlock",),
}


def main() -> int:
    """Makes or renews them all; says which could not be had."""
    failed = 0
    # uv shows how far it is by itself; in a pipe that would be noise.
    quiet = [] if sys.stderr.isatty() else ["--quiet"]
    for name, needed in PACKAGES.items():
        place = PEERS / name
        steps = (
            ["venv", *quiet, "--clear", "--python", sys.executable, str(place)],
            # The newest: our own dependencies must not hold a peer back.
            ["pip", "install", *quiet, "--python", str(place), "--upgrade", *needed],
        )
        for step in steps:
            done = subprocess.run([sys.executable, "-m", "uv", *step], check=False)
            if done.returncode != 0:
                print(f"{name} could not be installed; it will be left out", file=sys.stderr)
                failed += 1
                break
        else:
            print(f"{name}: {place}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
