"""Packages as `preload`: which of them a template shares with its forks.

By hand: `python -m tests.spares.preloads` prints the table, `--write` puts it into
docs/concepts/spares.md. It needs the packages; one that is missing keeps its row.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import sys
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from union import sandbox as sb

PAGE = Path(__file__).resolve().parents[2] / "docs" / "concepts" / "spares.md"
BEGIN, END = "<!-- preloads: begin -->", "<!-- preloads: end -->"
READY_S = 180.0


@dataclass(frozen=True, slots=True)
class Preload:
    """A module, its distribution, and code that prints ``ok`` if it works in a fork."""

    module: str
    distribution: str
    use: str
    is_large: bool = False
    """Takes long to install or to import."""


PRELOADS = (
    Preload("numpy", "numpy", "import numpy as n; a = n.eye(300); assert (a @ a == a).all()"),
    Preload(
        "pandas", "pandas", "import pandas as p; assert p.DataFrame({'a': [1, 2]}).a.sum() == 3"
    ),
    Preload(
        "matplotlib.pyplot",
        "matplotlib",
        "import matplotlib.pyplot as p; p.plot([1, 2]); p.savefig('p.png')",
    ),
    Preload(
        "scipy.optimize",
        "scipy",
        "from scipy import optimize\n"
        "assert optimize.minimize(lambda x: (x[0] - 1)**2, [0]).success",
        is_large=True,
    ),
    Preload(
        "sklearn.linear_model",
        "scikit-learn",
        "from sklearn.linear_model import LinearRegression as L\n"
        "assert abs(L().fit([[0], [1], [2]], [0, 1, 2]).coef_[0] - 1) < 1e-9",
        is_large=True,
    ),
    Preload("PIL.Image", "pillow", "from PIL import Image; Image.new('RGB', (9, 9)).save('i.png')"),
    Preload(
        "requests", "requests", "import requests; requests.Request('GET', 'http://a').prepare()"
    ),
    Preload("httpx", "httpx", "import httpx; httpx.Client().close()"),
    Preload(
        "pydantic",
        "pydantic",
        "import pydantic\nclass M(pydantic.BaseModel):\n    a: int\nassert M(a='3').a == 3",
    ),
    Preload(
        "polars",
        "polars",
        "import polars as p; assert p.DataFrame({'a': [1, 2]})['a'].sum() == 3",
        is_large=True,
    ),
    Preload(
        "torch",
        "torch",
        "import torch; a = torch.eye(300); assert bool((a @ a == a).all())",
        is_large=True,
    ),
)


@dataclass(frozen=True, slots=True)
class Found:
    """What became of a package as `preload`."""

    refusal: str
    """Why the template was refused; empty if its forks share the module."""
    first_ms: float
    """A command that uses it, forked or started."""


def is_installed(preload: Preload) -> bool:
    """Return whether the package can be imported here."""
    return importlib.util.find_spec(preload.module.partition(".")[0]) is not None


async def try_out(preload: Preload) -> Found:
    """Open a session with the package, and use it in two commands and a context."""
    async with sb.on_device.session(backend="userns", preload=(preload.module,)) as sbx:
        template = sbx._transport.pool.template  # type: ignore[union-attr]  # on this machine
        async with asyncio.timeout(READY_S):
            while not (template.is_ready or template.refusal):
                await sbx.run_code("pass")
                await asyncio.sleep(0.05)
        code = f"{preload.use}\nprint('ok')"
        kinds = []
        begun = 0.0
        for _ in range(2):
            await asyncio.sleep(0.3)  # the next fork is ready by then
            begun = time.perf_counter()
            proc = await sbx.run(code, script_type="python", timeout_s=120)
            taken_ms = (time.perf_counter() - begun) * 1000
            out, err = await proc.communicate_text()
            if out != "ok\n":
                raise AssertionError(f"{preload.module} does not work in a fork: {err}")
            kinds.append(proc.isolation.python)
        if kinds[-1] != ("started" if template.refusal else "forked"):
            raise AssertionError(f"{preload.module}: {kinds}, {template.refusal!r}")
        async with sbx.context() as ctx:
            result = await ctx.run(code, timeout_s=120)
            if result.stdout != "ok\n":
                raise AssertionError(f"{preload.module} does not work in a context: {result}")
        return Found(template.refusal, taken_ms)


def row(preload: Preload, found: Found) -> str:
    """Return a row of the table."""
    version = metadata.version(preload.distribution)
    result = f"no: {found.refusal}" if found.refusal else "yes"
    return f"| `{preload.module}` | {preload.distribution} {version} | {result} |"


def write(rows: dict[str, str]) -> None:
    """Put rows into the page; those of other modules stay."""
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    table, after = rest.split(END)
    known = {line.split("`")[1]: line for line in table.splitlines() if line.startswith("| `")}
    known |= rows
    lines = ["| module | tried with | shared with forks |", "|---|---|---|"]
    lines += [known[one.module] for one in PRELOADS if one.module in known]
    PAGE.write_text(f"{before}{BEGIN}\n" + "\n".join(lines) + f"\n{END}{after}", encoding="utf-8")


def main() -> int:
    """Try every package that is installed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("modules", nargs="*")
    options = parser.parse_args()
    rows = {}
    for preload in PRELOADS:
        if options.modules and preload.module not in options.modules:
            continue
        if not is_installed(preload):
            sys.stdout.write(
                f"{preload.module}: not installed (pip install {preload.distribution})\n"
            )
            continue
        found = asyncio.run(try_out(preload))
        rows[preload.module] = row(preload, found)
        sys.stdout.write(f"{rows[preload.module]} {found.first_ms:.0f} ms\n")
        sys.stdout.flush()
    if options.write:
        write(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
