"""What is installed and copied for other users is complete, readable and never stale."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from tests.environments import suite
from tests.environments.test_suite_elsewhere import counts


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project as its owner alone may see it."""
    root = tmp_path / "project"
    for name, text in {
        "pyproject.toml": "[project]\n",
        "native/launcher.c": "int main;",
        "src/pkg/__init__.py": "",
        "src/pkg/__pycache__/x.pyc": "old",
        "env/pyvenv.cfg": "",
        "env/lib/big.py": "",
        ".git/HEAD": "",
        "tests/contract/test_a.py": "",
        "tests/contract/conftest.py": "",
        "tests/environments/places.py": "",
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o600)
        path.parent.chmod(0o700)
    return root


def test_sources_are_what_a_wheel_is_built_from(project: Path) -> None:
    found = {str(path.relative_to(project)) for path in suite._sources(project)}
    assert found == {"pyproject.toml", "native/launcher.c", "src/pkg/__init__.py"}


@pytest.mark.parametrize("name", ["pyproject.toml", "native/launcher.c", "src/pkg/__init__.py"])
def test_any_changed_source_makes_the_installed_project_stale(project: Path, name: str) -> None:
    before = suite._digest(suite._sources(project), project)
    assert suite._digest(suite._sources(project), project) == before
    (project / name).write_text("changed")
    assert suite._digest(suite._sources(project), project) != before


def test_the_copy_has_tests_and_settings_but_no_sources_and_all_may_read_it(
    project: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    copy.mkdir(mode=0o700)
    suite.copy_tests(project, copy)
    files = {str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file()}
    assert files == {
        "pyproject.toml",
        "tests/contract/conftest.py",
        "tests/contract/test_a.py",
    }
    for path in (copy, *copy.rglob("*")):
        needed = 0o055 if path.is_dir() else 0o044
        assert stat.S_IMODE(path.stat().st_mode) & needed == needed, path


def test_a_project_in_a_closed_home_is_cached_elsewhere(tmp_path: Path) -> None:
    closed = tmp_path / "home"
    (closed / "project").mkdir(parents=True)
    closed.chmod(0o700)
    assert suite.first_closed(closed / "project") is not None
    assert suite.cache_directory(closed / "project").parent == Path("/var/tmp")
    assert suite.first_closed(Path("/usr/bin")) is None
    assert suite.cache_directory(Path("/usr/bin")) == Path("/usr/bin/.cache")


def test_a_cache_of_another_user_is_refused(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    with pytest.raises(suite.SuiteError, match="belongs to another user"):
        suite.user_venv(project, cache=tmp_path / "cache")


def test_a_failing_build_shows_the_output_of_the_tool() -> None:
    with pytest.raises(suite.SuiteError, match=r"ended with 3. do this\n(.|\n)*no compiler"):
        suite._step(["sh", "-c", "echo no compiler >&2; exit 3"], hint="do this")


def test_counts_are_read_from_the_last_line() -> None:
    assert counts("7 failed\n...\n3 passed, 1 skipped in 0.1s\n") == {"passed": 3, "skipped": 1}
    assert counts("") == {}
