"""Attacks through what later sessions and the host trust: the venv, settings, packages."""

# ruff: noqa: E501 - an attack program keeps each try on one line
from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.conftest import ISOLATED, session_of
from tests.escape.inside import attack
from tests.escape.plants import drive, snapshot

if TYPE_CHECKING:
    from tests.conftest import OpenSession

    from union import sandbox as sb

pytestmark = pytest.mark.spec("B5")
_VENV = ".sandbox-venv"

_POISON = """
import glob
site = glob.glob(given["venv"] + "/lib/python3*/site-packages")[0]
touch = f"open({given['marker']!r}, 'w')"
quiet = f"try:\\n    {touch}\\nexcept OSError:\\n    pass\\n"
write(site + "/poison.pth", f"import contextlib; exec({quiet!r})\\n")
for name in ("sitecustomize.py", "usercustomize.py", "_virtualenv.py", "uv.py"):
    write(f"{site}/{name}", quiet)
for name in ("python", "python3", "uv", "pip", "activate"):
    path = f"{given['venv']}/bin/{name}"
    os.path.lexists(path) and os.unlink(path)
    write(path, f"#!/bin/sh\\n: > {given['marker']}\\n")
    os.chmod(path, 0o755)
os.unlink(given["venv"] + "/pyvenv.cfg")
write(given["venv"] + "/pyvenv.cfg", f"home = {os.getcwd()}\\nexecutable = {given['venv']}/bin/python\\n")
"""


@pytest.mark.threat(46)
async def test_a_poisoned_venv_runs_nothing_outside(
    jailed: OpenSession, plant: Path, work: str
) -> None:
    """Start-up files, programs and settings of the venv, then a second session."""
    marker = plant / "ran-outside"
    given = {"marker": str(marker), "venv": f"{work}/{_VENV}"}
    async with jailed(host_work_dir=work) as jail:
        await attack(jail, _POISON, given=given)
        assert await jail.run_code("print('mended')") == "mended\n"
        await attack(jail, _POISON, given=given)
    for _ in range(2):
        async with jailed(host_work_dir=work) as jail:
            assert await jail.run_code("print('works')") == "works\n"
            await jail.put_bytes("x", b"x")
            await jail.get_bytes("x")
    assert not marker.exists()
    # Control: the poison does act when a host lets it.
    site = next(Path(work, _VENV, "lib").glob("python3*/site-packages"))
    subprocess.run(
        [sys.executable, "-I", "-c", f"import site; site.addsitedir({str(site)!r})"], check=True
    )
    assert marker.exists()


@pytest.mark.threat(4, 47)
def test_modules_in_the_work_dir_are_not_imported_by_the_host(
    cell: str, plant: Path, work: str
) -> None:
    """The owner stands in a poisoned work dir without a venv."""
    marker = plant / "ran-outside"
    poison = f"open({str(marker)!r}, 'w').close()\nraise SystemExit(3)\n"
    for name in ("sysconfig", "json", "subprocess", "venv", "ensurepip", "uv", "site", "encodings",
                 "sitecustomize", "array", "tempfile", "ctypes", "platform", "fcntl", "pwd"):  # fmt: skip
        Path(work, f"{name}.py").write_text(poison)
    for name in ("uv", "python", "python3", "sh", "ldconfig", "sandbox-launcher"):
        Path(work, name).write_text(f"#!/bin/sh\n: > {marker}\n")
        Path(work, name).chmod(0o755)
    body = """
    async with session(host_work_dir=os.getcwd()) as sbx:
        await sbx.put_bytes("file", b"x")
        await sbx.get_bytes("file")
        print((await sbx.exec("echo fine")).stdout.strip())
    """
    assert drive(cell, body, cwd=work, env={"PATH": f"{work}:{os.environ['PATH']}"}) == "fine\n"
    assert not marker.exists()
    assert Path(work, _VENV, "pyvenv.cfg").exists()
    done = subprocess.run([sys.executable, "-c", "import json"], cwd=work, check=False)
    assert done.returncode == 3, "the poison does act when a host lets it"
    assert marker.exists()


@pytest.mark.threat(48)
async def test_settings_in_the_work_dir_neither_steer_nor_stop_a_session(
    jailed: OpenSession, work: str
) -> None:
    """Broken files that tools look for from the working directory upwards."""
    for name in ("uv.toml", "pyproject.toml", "setup.cfg", ".python-version", ".env", "pip.conf",
                 "pyvenv.cfg", "python-wrapper.conf", ".netrc"):  # fmt: skip
        Path(work, name).write_text("][ = broken \0\n")
    async with jailed(host_work_dir=work) as jail:
        found = await attack(jail, "out['prefix'] = sys.prefix")
        assert found["prefix"] == f"{work}/{_VENV}"
    assert Path(work, _VENV, "bin", "python").is_symlink()


@pytest.mark.threat(49)
@pytest.mark.parametrize(
    "entry", ["", "pyvenv.cfg", "bin", "bin/python", "lib", "lib64", "lib/{py}", "lib/{py}/site-packages",
              "lib/{py}/site-packages/_union_sandbox.pth"]
)  # fmt: skip
async def test_product_files_replaced_by_links_lead_nowhere(
    jailed: OpenSession, plant: Path, work: str, entry: str
) -> None:
    """Each entry that the session made becomes a link to a plant of the right kind."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for name in ("pyvenv.cfg", "python", "site-packages", "_union_sandbox.pth"):
        (plant / name).write_text("plant") if "." in name else (plant / name).mkdir()
    (plant / version / "site-packages").mkdir(parents=True)
    path = f"{work}/{_VENV}/{entry.format(py=version)}".rstrip("/")
    code = """
    import shutil
    path, target = given["path"], given["plant"]
    is_file = os.path.isfile(path) and not os.path.isdir(path)
    os.rename(path, "moved-away")
    os.symlink(f"{target}/{os.path.basename(path)}" if is_file else target, path)
    """
    async with jailed(host_work_dir=work) as jail:
        await attack(jail, code, given={"path": path, "plant": str(plant)})
    assert os.path.islink(path), "the plant is linked"
    before = snapshot(plant)
    for _ in range(2):
        async with jailed(host_work_dir=work) as jail:
            assert await jail.run_code("print('works')") == "works\n"
        assert snapshot(plant) == before


@pytest.mark.threat(46, 49)
@pytest.mark.parametrize("shape", ["file", "fifo", "closed", "deep"])
async def test_a_venv_that_is_something_else_is_made_again(
    jailed: OpenSession, work: str, shape: str
) -> None:
    """The name taken by a file, a FIFO, a directory without rights, a deep tree."""
    code = """
    os.rename(given["venv"], "old")
    if given["shape"] == "file":
        write(given["venv"])
    elif given["shape"] == "fifo":
        os.mkfifo(given["venv"])
    elif given["shape"] == "closed":
        os.makedirs(given["venv"] + "/bin/python/x")
        os.chmod(given["venv"], 0)
    else:
        os.makedirs(given["venv"] + "/pyvenv.cfg" + "/d" * 200)
    """
    given = {"venv": f"{work}/{_VENV}", "shape": shape}
    async with jailed(host_work_dir=work) as jail:
        await attack(jail, code, given=given)
        assert await jail.run_code("print('mended')") == "mended\n"
    async with jailed(host_work_dir=work) as jail:
        assert await jail.run_code("print('works')") == "works\n"


@pytest.mark.threat(50, 51)
async def test_files_that_the_host_might_run_later_are_not_executed(
    jailed: OpenSession, plant: Path, work: str
) -> None:
    """Git hooks, shell start-up files, editor tasks planted in the work dir."""
    marker = plant / "ran-outside"
    code = """
    os.makedirs(".git/hooks")
    write(".git/config", f"[core]\\n\\tfsmonitor = touch {given['marker']}\\n")
    for name in (".bashrc", ".profile", ".bash_profile", ".zshenv", ".git/hooks/post-checkout", "Makefile", "conftest.py"):
        write(name, f": > {given['marker']}\\n")
        os.chmod(name, 0o755)
    """
    async with jailed(host_work_dir=work) as jail:
        await attack(jail, code, given={"marker": str(marker)})
    async with jailed(host_work_dir=work) as jail:
        await jail.exec("sh -l -c true; true")
        await jail.put_bytes("a/b", b"x")
    assert not marker.exists()
    subprocess.run(["sh", f"{work}/.profile"], check=True)
    assert marker.exists(), "the poison does act when a host lets it"


def _wheel(place: Path) -> Path:
    path = place / "planted-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("planted.py", "value = 'clean'\n")
        wheel.writestr(
            "planted-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: planted\nVersion: 1.0\n"
        )
        wheel.writestr(
            "planted-1.0.dist-info/WHEEL",
            "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        wheel.writestr(
            "planted-1.0.dist-info/RECORD",
            "planted.py,,\nplanted-1.0.dist-info/METADATA,,\nplanted-1.0.dist-info/WHEEL,,\nplanted-1.0.dist-info/RECORD,,\n",
        )
    return path


@pytest.mark.threat(30)
@pytest.mark.slow
async def test_an_installed_file_edited_in_place_stays_with_its_session(
    jailed: OpenSession, tmp_path: Path
) -> None:
    """Install, edit, install in a second session: clean."""
    place = tmp_path / "wheels"
    place.mkdir()
    wheel = _wheel(place)
    original = wheel.read_bytes()
    show = "import planted; print(planted.value)"
    command = ["uv", "pip", "install", "--offline", "--no-index", str(wheel)]
    async with (
        jailed(read_only_paths=[str(place)]) as one,
        jailed(read_only_paths=[str(place)]) as two,
    ):
        await one.exec(command, check=True)
        assert await one.run_code(show) == "clean\n"
        await one.run_code(
            "import planted; open(planted.__file__, 'r+').write('value = \"dirty\"  # edited')"
        )
        assert await one.run_code(show) == "dirty\n"
        await two.exec(command, check=True)
        assert await two.run_code(show) == "clean\n"
    assert wheel.read_bytes() == original


@pytest.mark.threat(49, 51)
async def test_the_script_file_cannot_be_changed_for_a_later_run(jail: sb.Session) -> None:
    """The script dir is fresh in each run and closed to the command."""
    code = """
    for path in ("/run/sandbox/main.py", "/run/sandbox/main.sh", "/run/sandbox/new", "/run/tools/uv"):
        out[path] = [attempt(write, path), attempt(os.rename, path, path + "2")]
    out["control"] = attempt(read, "/run/sandbox/main.py")
    """
    found = await attack(jail, code)
    assert found.pop("control") == "ok"
    assert all("ok" not in tries for tries in found.values()), found
    assert await jail.run_code("print('works')") == "works\n"


@pytest.mark.parametrize("backend", ISOLATED)
async def test_changes_of_a_waiting_python_to_the_venv_are_repaired(backend: str) -> None:
    """It runs what an earlier command left for it, between two commands, when nothing else runs."""
    plant = '''
import os, sysconfig
site = sysconfig.get_paths()["purelib"]
open(f"{site}/AA.pth", "w").write("import planted")
open(f"{site}/planted.py", "w").write("""
import os, time
if os.fork() == 0:
    time.sleep(0.15)
    python = os.environ["VIRTUAL_ENV"] + "/bin/python"
    os.unlink(python)
    os.symlink("/bin/false", python)
    os._exit(0)
""")
'''
    async with session_of(backend) as sbx:
        await sbx.run_code("print(1)")
        await sbx.run_code(plant)
        await asyncio.sleep(0.1)
        await sbx.exec("print(1)", script_type="python")
        await sbx.exec("true")
        await asyncio.sleep(0.6)
        assert (await sbx.exec("python -c 'print(5)'")).stdout == "5\n"
