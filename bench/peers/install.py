"""`make bench-peers`: create a separate virtualenv for each peer."""

from __future__ import annotations

import subprocess
import sys

from bench.contenders import PEERS

# With the packages that each needs: `unionai-sandbox` imports an extra and calls `uv`.
PACKAGES = {
    "unionai-sandbox": ("unionai-sandbox[flyte]", "uv"),
    "sandlock": ("sandlock",),
}


def main() -> int:
    """Create or update all virtualenvs; report failed installations."""
    failed = 0
    # uv shows its own progress on a terminal only.
    quiet = [] if sys.stderr.isatty() else ["--quiet"]
    for name, needed in PACKAGES.items():
        place = PEERS / name
        steps = (
            ["venv", *quiet, "--clear", "--python", sys.executable, str(place)],
            # The newest version: our own dependencies must not restrict a peer.
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
