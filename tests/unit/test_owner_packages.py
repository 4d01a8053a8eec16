"""Editable installs and `--user` packages of the owner, found without executing anything."""

from __future__ import annotations

import os
import site
from typing import TYPE_CHECKING

import pytest

from union.sandbox._linux import owner_packages

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.spec("B5", "B6")


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    path = tmp_path / "site-packages"
    path.mkdir()
    return path


def test_pth_files_and_finders_name_what_is_shown(tmp_path: Path, packages: Path) -> None:
    for name in ("flat", "src", "mapped/pkg", "redirected/pkg"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "mapped" / "module.py").touch()
    (tmp_path / "redirected" / "pkg" / "__init__.py").touch()
    (packages / "one.pth").write_text(f"# a comment\n{tmp_path}/flat\nimport os; os._exit(9)\n\n")
    (packages / "two.pth").write_text("../src\n../missing\n")
    mapping = {"pkg": f"{tmp_path}/mapped/pkg", "module": f"{tmp_path}/mapped/module.py"}
    (packages / "__editable___x_finder.py").write_text(
        f"raise SystemExit\nMAPPING: dict[str, str] = {mapping!r}\nNAMESPACES = {{}}\n"
    )
    (packages / "_editable_impl_y.py").write_text(
        "from editables.redirector import RedirectingFinder as F\nF.install()\n"
        f"F.map_module('pkg', {str(tmp_path / 'redirected/pkg/__init__.py')!r})\n"
    )
    (packages / "__editable___broken_finder.py").write_text("MAPPING = {")
    assert set(owner_packages.editable_paths([str(packages), "/nonexistent"])) == {
        f"{tmp_path}/mapped/pkg",
        f"{tmp_path}/mapped/module.py",
        f"{tmp_path}/redirected/pkg",
        f"{tmp_path}/flat",
        f"{tmp_path}/src",
    }


def test_a_home_directory_the_root_and_other_peoples_are_never_shown(
    tmp_path: Path, packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home" / "me"
    (home / "project").mkdir(parents=True)
    (tmp_path / "to-home").symlink_to(home)
    monkeypatch.setenv("HOME", str(home))
    lines = ["/", "/usr", str(home), str(home.parent), f"{home}/.", str(tmp_path / "to-home")]
    (packages / "broad.pth").write_text("\n".join([*lines, f"{home}/project"]) + "\n")
    assert owner_packages.editable_paths([str(packages)]) == (f"{home}/project",)
    if os.geteuid() == 0:
        os.chown(home / "project", 61234, 61234)
        assert owner_packages.editable_paths([str(packages)]) == ()


def test_the_user_site_counts_where_python_uses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site, "getusersitepackages", lambda: str(tmp_path))
    monkeypatch.setattr(site, "ENABLE_USER_SITE", False)
    assert owner_packages.user_site() is None
    monkeypatch.setattr(site, "ENABLE_USER_SITE", True)
    assert owner_packages.user_site() == str(tmp_path)
    monkeypatch.setattr(site, "getusersitepackages", lambda: str(tmp_path / "missing"))
    assert owner_packages.user_site() is None
