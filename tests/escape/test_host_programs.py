"""Attacks through programs that the host itself executes, planted by sandboxed code."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from union import sandbox as sb
from union.sandbox._linux import host_programs
from union.sandbox.on_device import _layers

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import OpenSession

pytestmark = pytest.mark.spec("G1", "G2")

_PLANT = """
import os
for name in ("bwrap", "uv", "python", "python3", "git"):
    with open(f"{place}/{name}", "w") as file:
        file.write("#!/bin/sh\\n: > {proof}\\n")
    os.chmod(f"{place}/{name}", 0o755)
"""


@pytest.fixture
def proof(tmp_path: Path) -> Path:
    """A file outside every sandbox, which exists as soon as a planted program has run there."""
    (tmp_path / "outside").mkdir()
    return tmp_path / "outside" / "ran"


def _is_planted(name: str, place: str, proof: Path) -> bool:
    """Positive control: a plain search finds the planted program, and it works."""
    found = shutil.which(name)
    if found != f"{place}/{name}":
        return False
    subprocess.run([found], check=True)
    ran = proof.exists()
    proof.unlink()
    return ran


@pytest.mark.threat(129)
@pytest.mark.parametrize("where", ["work dir", "read_write_paths", "link"])
async def test_a_program_left_where_sandboxed_code_writes_is_not_executed(
    jailed: OpenSession, work: str, proof: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory there is first on PATH, as an activated venv is; a link to it counts as well."""
    tmp_path = proof.parent.parent
    options: dict[str, object] = {"host_work_dir": work}
    place = f"{work}/.venv/bin"
    if where == "read_write_paths":
        place = str(tmp_path / "more" / "bin")
        options["read_write_paths"] = [str(tmp_path / "more")]
    os.makedirs(place)
    on_path = place
    if where == "link":
        on_path = str(tmp_path / "bin")
        os.symlink(place, on_path)
    monkeypatch.setenv("PATH", f"{on_path}:{os.environ['PATH']}")
    async with jailed(**options) as jail:
        await jail.run_code(_PLANT.replace("{place}", place).replace("{proof}", str(proof)))
        assert _is_planted("bwrap", on_path, proof)
        assert _is_planted("uv", on_path, proof)
        for mode in ("open", "blocked"):
            assert (await jail.exec("echo fine", network_mode=mode)).stdout == "fine\n"
    async with jailed(**options) as jail:
        assert (await jail.exec("echo fine; uv --version")).stdout.startswith("fine\nuv ")
    # Another session of this process, which does not show the place.
    async with jailed() as jail:
        assert (await jail.exec("uv --version")).stdout.startswith("uv ")
    assert _layers._uv().available
    assert _layers._bwrap().available
    assert not proof.exists()


@pytest.mark.threat(129)
async def test_without_another_program_the_session_is_refused_with_the_reason(
    work: str, proof: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = f"{work}/bin"
    os.makedirs(place)
    async with sb.on_device.session(backend="userns", host_work_dir=work) as jail:
        await jail.run_code(_PLANT.replace("{place}", place).replace("{proof}", str(proof)))
    monkeypatch.setenv("PATH", place)
    monkeypatch.setattr(host_programs, "SYSTEM_DIRECTORIES", ())
    assert _is_planted("bwrap", place, proof)
    with pytest.raises(sb.BackendUnavailableError, match="cannot be trusted") as caught:
        await sb.on_device.session(backend="bubblewrap", host_work_dir=work).open()
    assert f"{place}/bwrap" in str(caught.value)
    assert caught.value.missing == ("bwrap",)
    assert "outside every work dir" in caught.value.hint
    assert not proof.exists()
