"""Which programs the host executes: only those that no other user can replace."""

from __future__ import annotations

import os
import site
import stat
import sys
from typing import TYPE_CHECKING

import pytest

from union.sandbox._linux import host_programs
from union.sandbox._linux.host_programs import find
from union.sandbox._linux.pinning import Places, identity_of
from union.sandbox.errors import BackendUnavailableError

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.spec("G1")


@pytest.fixture(autouse=True)
def _nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    host_programs._known.clear()
    monkeypatch.setattr(host_programs, "SYSTEM_DIRECTORIES", ())
    monkeypatch.setenv("PATH", "")


def _program(directory: Path, name: str = "tool") -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / name
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def _places(*paths: Path, read_only: tuple[Path, ...] = ()) -> Places:
    return Places(
        frozenset(identity_of(path.stat()) for path in paths),
        frozenset(identity_of(path.stat()) for path in read_only),
    )


def _refused(directory: Path, places: Places | None = None) -> str:
    host_programs._known.clear()  # what was safe a moment ago is judged again
    search = find("tool", places=places or Places(), before=(str(directory),))
    assert search.program is None
    return "; ".join(search.refused)


def test_a_program_of_the_caller_is_found_by_its_canonical_path(trusted_dir: Path) -> None:
    program = _program(trusted_dir / "real")
    (trusted_dir / "link").symlink_to("real")
    for place in ("real", "link", "real/../link/."):
        search = find("tool", places=Places(), before=(str(trusted_dir / place),))
        assert search.program is not None
        assert search.program.path == str(program)
        assert search.refused == ()


def test_a_program_that_others_can_replace_is_skipped_for_the_next(
    trusted_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _program(trusted_dir / "open")
    (trusted_dir / "open").chmod(0o777)
    program = _program(trusted_dir / "closed")
    monkeypatch.setenv("PATH", f"{trusted_dir}/open:relative:{trusted_dir}/closed")
    search = find("tool", places=Places())
    assert search.program is not None
    assert search.program.path == str(program)
    assert search.refused == (
        f"{trusted_dir}/open/tool: {trusted_dir}/open is writable by every user",
    )


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o757])
def test_a_directory_above_that_others_can_write_is_refused(trusted_dir: Path, mode: int) -> None:
    """Sticky ones as well: the first user to make an entry there owns the name."""
    _program(trusted_dir / "a" / "b")
    (trusted_dir / "a").chmod(mode)
    assert "is writable by every user" in _refused(trusted_dir / "a" / "b")
    (trusted_dir / "a").chmod(0o755)
    assert find("tool", places=Places(), before=(str(trusted_dir / "a/b"),)).program is not None


def test_a_writable_file_and_another_owner_are_refused(trusted_dir: Path) -> None:
    program = _program(trusted_dir)
    program.chmod(0o757)
    assert "tool is writable by every user" in _refused(trusted_dir)
    program.chmod(0o755)
    if os.geteuid() == 0:
        os.chown(program, 61234, 61234)
        assert "tool belongs to user 61234" in _refused(trusted_dir)
        os.chown(program, 0, 0)
        (trusted_dir / "d").mkdir()
        _program(trusted_dir / "d")
        os.chown(trusted_dir / "d", 61234, 0)
        assert "d belongs to user 61234" in _refused(trusted_dir / "d")


def test_a_group_of_others_is_refused_and_a_private_one_is_not(
    trusted_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _program(trusted_dir)
    trusted_dir.chmod(0o775)
    monkeypatch.setattr(host_programs, "_is_private_group", lambda _: False)
    assert "is writable by group" in _refused(trusted_dir)
    monkeypatch.setattr(host_programs, "_is_private_group", lambda _: True)
    assert find("tool", places=Places(), before=(str(trusted_dir),)).program is not None
    monkeypatch.setattr(host_programs, "_has_acl", lambda _: True)
    assert "is writable by group" in _refused(trusted_dir)


def test_a_link_is_judged_by_where_it_is_and_where_it_leads(trusted_dir: Path) -> None:
    _program(trusted_dir / "work" / "bin")
    safe = _program(trusted_dir / "safe")
    places = _places(trusted_dir / "work")
    (trusted_dir / "out").symlink_to("work/bin")
    assert "sandboxed code can write" in _refused(trusted_dir / "out", places)
    assert "sandboxed code can write" in _refused(trusted_dir / "work" / "bin", places)
    (trusted_dir / "work" / "bin" / "tool").unlink()
    (trusted_dir / "work" / "bin" / "tool").symlink_to(safe)
    assert "is a link where sandboxed code can write" in _refused(trusted_dir / "out", places)
    (trusted_dir / "work" / "up").symlink_to("..")
    assert "is a link" in _refused(trusted_dir / "work" / "up" / "safe", places)
    # Up and out again by names that are no links is no matter of the work dir.
    search = find("tool", places=places, before=(f"{trusted_dir}/work/../safe",))
    assert search.program is not None


def test_what_is_shown_read_only_in_a_writable_place_is_safe(trusted_dir: Path) -> None:
    _program(trusted_dir / "work" / "venv" / "bin")
    work, venv = trusted_dir / "work", trusted_dir / "work" / "venv"
    search = find("tool", places=_places(work, read_only=(venv,)), before=(str(venv / "bin"),))
    assert search.program is not None
    assert "sandboxed code can write" in _refused(venv / "bin", _places(work))


def test_what_is_no_program_is_passed_over_without_a_word(trusted_dir: Path) -> None:
    (trusted_dir / "tool").mkdir()
    assert _refused(trusted_dir) == ""
    (trusted_dir / "tool").rmdir()
    (trusted_dir / "tool").touch(0o644)
    assert _refused(trusted_dir) == ""
    assert _refused(trusted_dir / "missing") == ""
    (trusted_dir / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="symbolic links"):
        _refused(trusted_dir / "loop")


def test_uv_of_a_user_install_is_found(trusted_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`pip install --user uv`: the package is in the user's site, the program in its scripts."""
    scripts = _program(trusted_dir / "bin", "uv")
    package = trusted_dir / "lib" / "python3" / "site-packages" / "uv"
    package.mkdir(parents=True)
    (package / "_find_uv.py").write_text(f"def find_uv_bin():\n    return {str(scripts)!r}\n")
    for name in ("executable", "prefix", "base_prefix"):
        monkeypatch.setattr(sys, name, str(trusted_dir / "none" / "bin" / "python"))
    monkeypatch.setattr(host_programs.sysconfig, "get_path", lambda *_, **__: "/nonexistent")
    monkeypatch.setattr(site, "getsitepackages", list)
    monkeypatch.setattr(site, "ENABLE_USER_SITE", True)
    monkeypatch.setattr(site, "getusersitepackages", lambda: str(package.parent))
    assert host_programs.find_uv(Places()) == str(scripts)
    with pytest.raises(BackendUnavailableError, match="refused") as caught:
        host_programs.find_uv(_places(trusted_dir / "bin"))
    assert caught.value.missing == ("uv",)
    assert stat.S_IMODE(scripts.stat().st_mode) == 0o755


def test_uv_is_not_imported_from_the_current_directory(
    trusted_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file `uv.py` that sandboxed code left in the work dir is no package of the owner."""
    marker = trusted_dir / "imported"
    (trusted_dir / "uv").mkdir()
    for file in (trusted_dir / "uv.py", trusted_dir / "uv" / "_find_uv.py"):
        file.write_text(f"open({str(marker)!r}, 'w')\n")
    (trusted_dir / "uv" / "__init__.py").touch()
    monkeypatch.chdir(trusted_dir)
    monkeypatch.setattr(sys, "path", [str(trusted_dir), *sys.path])
    monkeypatch.setattr(host_programs.sysconfig, "get_path", lambda *_, **__: "/nonexistent")
    monkeypatch.setattr(sys, "executable", str(trusted_dir / "none" / "python"))
    monkeypatch.setattr(site, "getsitepackages", list)
    monkeypatch.setattr(site, "ENABLE_USER_SITE", False)
    with pytest.raises(BackendUnavailableError, match="uv was not found"):
        host_programs.find_uv(Places())
    assert not marker.exists()
