"""Packages that users preload: their forks work, and the page says which are shared."""

from __future__ import annotations

import os

import pytest
from tests.spares import preloads

EVERYWHERE = os.environ.get("EVERYWHERE") == "1"
USUAL = ("numpy", "pandas", "matplotlib", "PIL", "requests", "httpx", "pydantic")
"""Packages that the other tests use too. The rest is hundreds of megabytes."""
TRIED = [one for one in preloads.PRELOADS if EVERYWHERE or one.module.startswith(USUAL)]


def documented() -> dict[str, bool]:
    """Return, by module, whether the page says that forks share it."""
    table = preloads.PAGE.read_text(encoding="utf-8").split(preloads.BEGIN)[1]
    lines = table.split(preloads.END)[0].splitlines()
    rows = [line.split("|") for line in lines if line.startswith("| `")]
    return {cells[1].strip(" `"): cells[3].strip() == "yes" for cells in rows}


def test_the_page_has_every_package() -> None:
    assert list(documented()) == [preload.module for preload in preloads.PRELOADS]


@pytest.mark.timeout(300)
@pytest.mark.spec("N1")
@pytest.mark.parametrize("preload", TRIED, ids=lambda preload: preload.module)
async def test_a_package_works_in_forks_as_the_page_says(preload: preloads.Preload) -> None:
    if not preloads.is_installed(preload):
        pytest.skip(f"{preload.module} is not installed: pip install {preload.distribution}")
    found = await preloads.try_out(preload)
    assert (not found.refusal) == documented()[preload.module], found.refusal
