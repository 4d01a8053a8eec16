"""Fixtures of the cluster tests: a home of their own, because the SDK keeps a cache there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Provide a home without configuration, and unset the variables that configure Flyte."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    for name in ("FLYTECTL_CONFIG", "UCTL_CONFIG", "FLYTE_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    return home
