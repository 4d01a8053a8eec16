"""The launcher under sanitizers, and the ways it can be missing."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from tests.conftest import session_of

from union import sandbox as sb
from union.sandbox._linux import hand_over, launcher

NATIVE = Path(__file__).parents[2] / "native"
SOURCES = sorted(str(path) for path in NATIVE.glob("*.c"))
FLAGS = ("-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-g", "-O1")
SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
# Leak checking needs ptrace, and nothing the launcher holds is ever given back one by one.
OPTIONS = """\
const char *__asan_default_options(void);
const char *__asan_default_options(void) { return "detect_leaks=0"; }
"""


def cc() -> str:
    found = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if found is None:
        pytest.skip("no C compiler: apt-get install gcc libc6-dev")
    return found


def build(out: Path, *arguments: str) -> Path:
    subprocess.run([cc(), *FLAGS, *arguments, "-o", str(out)], check=True)
    return out


@pytest.fixture
def other_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Makes the next session start its own launcher from a path the test fills."""
    path = tmp_path / "sandbox-launcher"
    monkeypatch.setattr(launcher, "BINARY", path)
    monkeypatch.setattr(launcher.Launcher, "_current", None)
    return path


async def test_the_launcher_runs_clean_under_address_and_undefined_sanitizers(
    other_launcher: Path, tmp_path: Path
) -> None:
    (tmp_path / "options.c").write_text(OPTIONS)
    build(other_launcher, *SANITIZE, *SOURCES, str(tmp_path / "options.c"))
    async with session_of("userns", resources=sb.Resources(memory="256Mi")) as sbx:
        assert (await sbx.exec("echo fine; exit 3")).returncode == 3
        assert await sbx.run_code("print(6 * 7)") == "42\n"
        assert (await sbx.exec("echo " + "x" * 300_000)).ok
        assert (await sbx.exec("sleep 9", timeout_s=0.2)).termination_reason == "timeout"
        proc = await sbx.run("stty size", pty=(5, 6))
        assert await proc.communicate() == (b"5 6\r\n", b"")
        proc = await sbx.run(["/nothing/here"], stdout=True)
        assert await proc.wait() == 127


async def test_a_launcher_that_was_not_built_is_named_with_its_remedy(other_launcher: Path) -> None:
    del other_launcher
    with pytest.raises(sb.BackendUnavailableError, match="was not built") as caught:
        await session_of("userns").open()
    assert "C compiler" in caught.value.hint


async def test_a_launcher_of_another_architecture_is_named_as_such(other_launcher: Path) -> None:
    elf = bytearray(Path("/bin/sh").read_bytes()[:4096])
    elf[18:20] = b"\xf3\x00"  # e_machine: RISC-V
    other_launcher.write_bytes(elf)
    other_launcher.chmod(0o755)
    with pytest.raises(sb.BackendUnavailableError, match="another architecture") as caught:
        await session_of("userns").open()
    assert "reinstall" in caught.value.hint


async def test_a_command_whose_file_was_cut_is_refused_and_gets_no_exit_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To read beyond the end of a file is a signal, which would look like the command's own end."""
    whole = hand_over.sealed_memfd

    def cut(name: str, data: bytes, **options: object) -> int:
        return whole(name, data[:40960] if name == "request" else data, **options)

    monkeypatch.setattr(hand_over, "sealed_memfd", cut)
    async with session_of("userns") as sbx:
        proc = await sbx.run(["/bin/echo", "x" * 100_000, "y" * 100_000], stdout=True)
        with pytest.raises(sb.SandboxExecutionError, match="request"):
            await proc.wait()
