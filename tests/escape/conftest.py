"""Fixtures of the attacks: sessions of every isolating backend, and targets on the host."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from tests.conftest import ISOLATED, OpenSession, leave_out, session_of
from tests.escape.plants import SECRET, Victim, end, start_victim

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


WORK_OF_THE_HOST = frozenset(
    {
        "test_event_loop",
        "test_file_api",
        "test_file_trees",
        "test_inspected_links",
        "test_venv_supply",
    }
)
"""Modules that attack what the host does with the files of a work dir. It does so before and after
a sandbox exists, in the same way for each backend: they run on the default backend, and on a
server; with ``EVERYWHERE=1`` on all, and with ``--only-way`` on the named one."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Drop repetitions over other backends where the host alone is attacked."""
    if os.environ.get("EVERYWHERE") != "1" and config.getoption("--only-way") is None:
        leave_out(config, items, _is_repetition)


def _is_repetition(item: pytest.Item) -> bool:
    if item.path.parent.name != "escape" or item.path.stem not in WORK_OF_THE_HOST:
        return False
    call = getattr(item, "callspec", None)
    return call is not None and any(value in ISOLATED[1:] for value in call.params.values())


@pytest.fixture(params=ISOLATED)
def cell(request: pytest.FixtureRequest) -> str:
    """The name of an isolating backend."""
    return request.param


@pytest.fixture
def jailed(cell: str) -> OpenSession:
    """Return a factory of isolated sessions, which the test opens and closes."""
    return lambda **options: session_of(cell, **options)


@pytest.fixture
def plant(tmp_path: Path) -> Path:
    """A world-writable directory of the host, with a file and a directory in it."""
    tree = tmp_path / "plant"
    (tree / "inner").mkdir(parents=True)
    (tree / "secret").write_text(SECRET)
    (tree / "inner" / "deep").write_text(SECRET)
    for path in (tree, tree / "inner"):
        path.chmod(0o777)
    for path in (tree / "secret", tree / "inner" / "deep"):
        path.chmod(0o666)
    return tree


@pytest.fixture
def work(tmp_path: Path) -> str:
    """A work dir that outlives the session, beside the plant and on its file system."""
    path = tmp_path / "work"
    path.mkdir()
    return str(path)


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Victim]:
    """A process of the host."""
    directory = tmp_path / "victim"
    directory.mkdir()
    found = start_victim(directory)
    yield found
    end(found.process)
