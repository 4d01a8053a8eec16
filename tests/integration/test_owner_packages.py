"""Code inside imports what the owner's Python imports: editable installs, `pip install --user`."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from tests.conftest import ISOLATED
from tests.escape.plants import driver_source

import union.sandbox
from union.sandbox._linux import host_programs
from union.sandbox._linux.pinning import Places

pytestmark = pytest.mark.spec("B5", "B6")

_LOOK = """
work, names = sys.argv[1], sys.argv[2]
async with session(host_work_dir=work) as jail:
    print(await jail.run_code(f"import {names}\\nfor m in ({names},): print(m.__file__)"))
    print((await jail.exec(f"touch {os.environ['EDITABLE']}/planted")).returncode)
"""


def _seen_paths() -> str:
    paths = sysconfig.get_paths()
    own = Path(union.sandbox.__file__).parents[2]
    return "\n".join(dict.fromkeys((paths["purelib"], paths["platlib"], str(own)))) + "\n"


def _run(python: Path, way: str, arguments: list[str], env: dict[str, str]) -> list[str]:
    command = [python, "-c", driver_source(way, _LOOK), *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env={**os.environ, **env}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize("way", ISOLATED)
def test_editable_installs_of_the_owner_are_visible_and_read_only(way: str, tmp_path: Path) -> None:
    """A `.pth` file with a path, and a finder that maps names to paths."""
    venv, work = tmp_path / "venv", tmp_path / "work"
    for directory in (work, tmp_path / "src", tmp_path / "other" / "mapped"):
        directory.mkdir(parents=True)
    base = getattr(sys, "_base_executable", sys.executable)
    subprocess.run([base, "-m", "venv", "--without-pip", venv], check=True)
    site = next(venv.glob("lib/python*/site-packages"))
    (site / "seen.pth").write_text(_seen_paths())
    (venv / "bin" / "uv").symlink_to(host_programs.find_uv(Places()))
    (tmp_path / "src" / "plain.py").touch()
    (tmp_path / "other" / "mapped" / "__init__.py").touch()
    (site / "plain.pth").write_text(f"{tmp_path}/src\n")
    (site / "__editable__.mapped.pth").write_text(
        "import __editable___mapped_finder; __editable___mapped_finder.install()\n"
    )
    (site / "__editable___mapped_finder.py").write_text(
        "import importlib.machinery, importlib.util, sys\n"
        f"MAPPING = {{'mapped': {str(tmp_path / 'other/mapped')!r}}}\n"
        "class Finder:\n"
        "    @classmethod\n"
        "    def find_spec(cls, name, path=None, target=None):\n"
        "        if name in MAPPING:\n"
        "            file = MAPPING[name] + '/__init__.py'\n"
        "            return importlib.util.spec_from_file_location(name, file)\n"
        "def install():\n"
        "    sys.meta_path.append(Finder)\n"
    )
    env = {"EDITABLE": f"{tmp_path}/src"}
    found = _run(venv / "bin" / "python", way, [str(work), "plain, mapped"], env)
    assert found == [f"{tmp_path}/src/plain.py", f"{tmp_path}/other/mapped/__init__.py", "1"]
    assert not (tmp_path / "src" / "planted").exists()
    # Below the work dir it is the caller's wish that it can be written.
    found = _run(venv / "bin" / "python", way, [str(tmp_path / "src"), "plain, mapped"], env)
    assert found == [f"{tmp_path}/src/plain.py", f"{tmp_path}/other/mapped/__init__.py", "0"]


@pytest.mark.parametrize("way", ISOLATED)
def test_packages_of_a_user_install_are_visible_and_read_only(way: str, tmp_path: Path) -> None:
    """The base interpreter with a user base of its own."""
    python = Path(getattr(sys, "_base_executable", sys.executable))
    env = {"PYTHONUSERBASE": str(tmp_path / "user"), "PATH": os.environ["PATH"]}
    show = [python, "-c", "import site; print(site.getusersitepackages())"]
    site = Path(subprocess.check_output(show, text=True, env=env).strip())
    (tmp_path / "work").mkdir()
    site.mkdir(parents=True)
    (site / "seen.pth").write_text(_seen_paths())
    (site / "personal.py").touch()
    bin_dir = tmp_path / "user" / "bin"
    bin_dir.mkdir()
    env["EDITABLE"] = str(site)
    env["PATH"] = f"{Path(host_programs.find_uv(Places())).parent}:{os.environ['PATH']}"
    found = _run(python, way, [str(tmp_path / "work"), "personal"], env)
    assert found == [f"{site}/personal.py", "1"]
    assert not (site / "planted").exists()
