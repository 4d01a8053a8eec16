"""The session venv: packages of the owner, installs that last, and what damage does."""

from __future__ import annotations

import os
import sysconfig
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import iniconfig  # of the owner's packages, the quickest to import
import pytest

if TYPE_CHECKING:
    from tests.conftest import OpenSession

    from union import sandbox as sb

VENV = ".sandbox-venv"
PREFIX = "import sys; print(sys.prefix)"


def wheel(name: str, version: str, source: str, *, script: str = "") -> tuple[str, bytes]:
    """A wheel made by hand: one module, maybe one console script."""
    import io

    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": source,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    if script:
        files[f"{info}/entry_points.txt"] = f"[console_scripts]\n{script} = {name}:main\n"
    files[f"{info}/RECORD"] = "".join(f"{n},,\n" for n in (*files, f"{info}/RECORD"))
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return f"{name}-{version}-py3-none-any.whl", held.getvalue()


async def install(session: sb.Session, *made: tuple[str, bytes]) -> sb.ExecResult:
    for name, data in made:
        await session.put_bytes(name, data)
    names = " ".join(f"./{name}" for name, _ in made)
    return await session.exec(f"uv pip install --offline --no-index {names}")


@pytest.mark.spec("B5")
async def test_python_is_the_venvs_by_every_name(sbx: sb.Session) -> None:
    venv = f"{sbx.work_dir}/{VENV}"
    assert await sbx.run_code(PREFIX) == f"{venv}\n"
    for name in ("python", "python3", f"{venv}/bin/python"):
        assert (await sbx.exec([name, "-c", PREFIX])).stdout == f"{venv}\n"
    assert (await sbx.exec("uv --version")).stdout.startswith("uv ")


@pytest.mark.spec("B5", "B6")
async def test_the_owners_interpreter_and_packages_are_seen(sbx: sb.Session) -> None:
    import sys

    out = await sbx.run_code("import sys; print(sys.version_info[:3], sys.base_prefix)")
    assert out == f"{sys.version_info[:3]} {sys.base_prefix}\n"
    out = await sbx.run_code("import pytest; print(pytest.__version__, pytest.__file__)")
    assert out == f"{pytest.__version__} {pytest.__file__}\n"


@pytest.mark.spec("B5", "C3")
async def test_an_install_lasts_for_the_session(sbx: sb.Session) -> None:
    made = wheel(
        "contractpkg",
        "1.2",
        "def main():\n    print('from script')\nx = 41\n",
        script="contract-tool",
    )
    result = await install(sbx, made)
    assert result.ok, result.stderr
    assert await sbx.run_code("import contractpkg; print(contractpkg.x + 1)") == "42\n"
    assert (
        await sbx.exec("python -c 'import contractpkg; print(contractpkg.__file__)'")
    ).stdout.startswith(f"{sbx.work_dir}/{VENV}/lib/")
    assert (await sbx.exec("contract-tool")).stdout == "from script\n"
    listed = await sbx.exec("uv pip show contractpkg")
    assert "Version: 1.2" in listed.stdout


@pytest.mark.spec("B5")
async def test_an_install_hides_the_owners_package_and_leaves_it_alone(sbx: sb.Session) -> None:
    site = Path(sysconfig.get_paths()["purelib"])
    before = sorted(p.name for p in site.iterdir())
    result = await install(sbx, wheel("iniconfig", "99.0", "x = 'mine'\n"))
    assert result.ok, result.stderr
    assert await sbx.run_code("import iniconfig; print(iniconfig.x)") == "mine\n"
    assert sorted(p.name for p in site.iterdir()) == before
    assert not hasattr(iniconfig, "x")


@pytest.mark.spec("B5", "B3")
async def test_a_pinned_dir_keeps_its_installs(open_session: OpenSession, tmp_path: Path) -> None:
    async with open_session(host_work_dir=str(tmp_path)) as session:
        assert (await install(session, wheel("contractpkg", "1.0", "x = 1\n"))).ok
    async with open_session(host_work_dir=str(tmp_path)) as session:
        assert await session.run_code("import contractpkg; print(contractpkg.x)") == "1\n"


@pytest.mark.spec("B5")
async def test_the_owners_packages_cannot_be_changed(jail: sb.Session) -> None:
    site = sysconfig.get_paths()["purelib"]
    result = await jail.exec(f"touch {site}/contract-evil.py")
    assert result.returncode != 0
    assert not os.path.exists(f"{site}/contract-evil.py")


DAMAGE = {
    "python link deleted": "rm {venv}/bin/python",
    "python link to elsewhere": "ln -sf /bin/false {venv}/bin/python",
    "python replaced by a program": "rm {venv}/bin/python; cp /bin/echo {venv}/bin/python",
    "config poisoned": "echo 'home = /nonexistent' > {venv}/pyvenv.cfg",
    "config removed": "rm {venv}/pyvenv.cfg",
    "config huge": "truncate -s 1G {venv}/pyvenv.cfg",
    "config a fifo": "rm {venv}/pyvenv.cfg; mkfifo {venv}/pyvenv.cfg",
    "venv a file": "rm -rf {venv}; echo x > {venv}",
    "venv a fifo": "rm -rf {venv}; mkfifo {venv}",
    "venv a link to outside": "rm -rf {venv}; ln -s {outside} {venv}",
    "bin a link to outside": "rm -rf {venv}/bin; ln -s {outside} {venv}/bin",
    "lib removed": "rm -rf {venv}/lib",
    "lib a link to outside": "rm -rf {venv}/lib; ln -s {outside} {venv}/lib",
    "no rights": "chmod 0 {venv}/bin {venv}",
    "all gone": "rm -rf {venv}",
}


@pytest.mark.spec("B5")
@pytest.mark.parametrize("damage", DAMAGE)
async def test_python_works_after_damage_and_nothing_outside_is_touched(
    open_session: OpenSession, tmp_path: Path, damage: str
) -> None:
    work, outside = tmp_path / "work", tmp_path / "outside"
    work.mkdir()
    outside.mkdir()
    (outside / "kept").write_text("kept")
    async with open_session(host_work_dir=str(work)) as session:
        venv = work / VENV
        code = "import sys, iniconfig; print(sys.prefix, iniconfig.__file__)"
        for script, kind in ((code, "python"), (f"python -c '{code}'", "shell")):
            done = await session.exec(DAMAGE[damage].format(venv=venv, outside=outside))
            assert done.ok, done.stderr
            result = await session.exec(script, script_type=kind, timeout_s=25)
            assert result.stdout == f"{venv} {iniconfig.__file__}\n", (kind, result.stderr)
    assert [p.name for p in outside.iterdir()] == ["kept"]
    assert (outside / "kept").read_text() == "kept"


@pytest.mark.spec("B5")
async def test_the_host_runs_nothing_of_the_venv(jail: sb.Session, tmp_path: Path) -> None:
    marker = tmp_path / "ran-on-host"
    poison = f"import pathlib; pathlib.Path({str(marker)!r}).write_text('x')\n"
    await jail.run(
        f"cat > {VENV}/lib/evil.txt; d=$(ls -d {VENV}/lib/python*/site-packages); "
        f"cp {VENV}/lib/evil.txt $d/sitecustomize.py; cp {VENV}/lib/evil.txt $d/evil.pth",
        stdin=poison.encode(),
    )
    await jail.exec("print(1)", script_type="python")
    await jail.exec("python -c 1; uv pip list --offline")
    await jail.put_bytes("f", b"")
    assert not marker.exists()
