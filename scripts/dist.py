"""`make dist`: build all release files from the source distribution, and check them.

``dist/`` gets the source distribution and the wheel for this machine, so that ``pip install
dist/*.whl`` works; ``dist/elsewhere/`` gets the wheels for other machines. The Linux wheels contain
the launcher, compiled for both architectures with the compiler of the package ``ziglang``. So do
those for macOS, with the portable launcher.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from scripts.dist_checks import check_sdist, check_wheel

ROOT = Path(__file__).resolve().parents[1]
ARCHITECTURES = ("x86_64", "aarch64")
MACS = ("macos-arm64", "macos-x86_64")
PURE = "any"
LAUNCHER = ROOT / "src/union/sandbox/_linux/bin/sandbox-launcher"


def note(text: str) -> None:
    """Print progress on a terminal; print nothing in a pipe."""
    if sys.stderr.isatty():
        print(f"  {text} ...", file=sys.stderr, flush=True)


def build(source: Path, target: Path, *kind: str, **env: str) -> Path:
    """Build one file from ``source`` into ``target``, with the build tools of this environment."""
    with tempfile.TemporaryDirectory(prefix="sbx-dist-") as scratch:
        command = [
            *("uv", "build", "--quiet", "--no-build-isolation", "--python", sys.executable),
            *("--out-dir", scratch, *kind, str(source)),
        ]
        tools = os.path.dirname(sys.executable)
        path = f"{tools}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(command, check=False, env={**os.environ, "PATH": path, **env})
        if done.returncode != 0:
            sys.exit(f"dist: {' '.join(kind)} {env} could not be built")
        (made,) = (p for p in Path(scratch).iterdir() if p.suffix in {".whl", ".gz"})
        target.mkdir(parents=True, exist_ok=True)
        return Path(shutil.move(made, target / made.name))


def build_wheel(sdist: Path, target: Path, architecture: str) -> Path:
    """Build the wheel for one architecture; ``any`` is the one without a launcher."""
    variables = {"UNION_SANDBOX_TARGET": architecture}
    if architecture == PURE:
        variables = {"UNION_SANDBOX_SKIP_NATIVE": "1"}
    return build(sdist, target, "--wheel", **variables)


def try_out(wheel: Path) -> float:
    """Install into an empty virtualenv without a compiler; return the seconds of the quickstart."""
    with tempfile.TemporaryDirectory(prefix="sbx-dist-") as scratch:
        begun = time.monotonic()
        python = f"{scratch}/venv/bin/python"
        subprocess.run([sys.executable, "-m", "venv", f"{scratch}/venv"], check=True)
        kept = {k: v for k, v in os.environ.items() if k not in {"CC", "PYTHONPATH"}}
        env = {**kept, "PATH": f"{scratch}/venv/bin"}
        pip = [python, "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
        subprocess.run([*pip, str(wheel)], check=True, cwd=scratch, env=env)
        done = subprocess.run(
            [python, str(ROOT / "examples/quickstart.py")],
            check=True,
            cwd=scratch,
            env=env,
            stdout=subprocess.PIPE,
            text=True,
        )
        if done.stdout != "0 ['1', '2', '3']\n6\nb'1\\n2\\n3\\n'\n":
            sys.exit(f"dist: the quickstart printed {done.stdout!r}")
        return time.monotonic() - begun


def main(arguments: list[str] | None = None) -> int:
    """Build, check and try all files, and list them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=ROOT / "dist", metavar="DIR")
    output: Path = parser.parse_args(arguments).output
    shutil.rmtree(output, ignore_errors=True)
    note("source distribution")
    sdist = build(ROOT, output, "--sdist")
    check_sdist(sdist)
    here = platform.machine() if sys.platform == "linux" else PURE
    wheels = {}
    for architecture in (*ARCHITECTURES, *MACS, PURE):
        note(f"wheel for {architecture} (the first time, the compiler takes about a minute)")
        place = output if architecture == here else output / "elsewhere"
        wheels[architecture] = build_wheel(sdist, place, architecture)
        check_wheel(wheels[architecture], architecture=architecture, source=ROOT / "src")
    for made in (sdist, *wheels.values()):
        print(f"{made.stat().st_size / 1024:6.0f} KiB  {made.relative_to(output.parent)}")
    if here in ARCHITECTURES:
        note("quickstart in an empty virtualenv")
        spent = try_out(wheels[here])
        print(f"{spent:6.1f} s    an empty virtualenv, pip install with no compiler, quickstart")
    return 0


if __name__ == "__main__":
    sys.exit(main())
