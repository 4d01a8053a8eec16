"""run(): shell text, Python source, argv; when it returns; what it leaves behind."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest
from tests.conftest import ISOLATED, SOON_S, OpenSession, eventually, sandbox_processes

from union import sandbox as sb

MIB = 1024 * 1024


@pytest.mark.spec("C1", "C4")
async def test_a_string_is_shell_text(sbx: sb.Session) -> None:
    result = await sbx.exec("x=1; for i in a b; do echo $i$x; done | sort -r; echo $0")
    assert result.stdout == f"b1\na1\n{os.path.basename(sbx.shell)}\n"


@pytest.mark.spec("C1")
async def test_a_list_is_an_argv_without_a_shell(sbx: sb.Session) -> None:
    result = await sbx.exec(["printf", "%s|", "$HOME", "a b", "*", "", "'", ";echo", "é\n"])
    assert result.stdout == "$HOME|a b|*||'|;echo|é\n|"


@pytest.mark.spec("C1")
async def test_a_tuple_is_an_argv_too_and_programs_may_be_paths(sbx: sb.Session) -> None:
    assert (await sbx.exec(("/bin/echo", "hi"))).stdout == "hi\n"
    await sbx.put_bytes("tool", b"#!/bin/sh\necho tool $1\n", mode=0o755)
    assert (await sbx.exec(["./tool", "x"])).stdout == "tool x\n"


@pytest.mark.spec("C1", "C5")
async def test_programs_of_an_argv_are_found_on_the_commands_path(sbx: sb.Session) -> None:
    await sbx.put_bytes("bin/greet", b"#!/bin/sh\necho hello\n", mode=0o755)
    found = await sbx.exec(["greet"], env={"PATH": f"{sbx.work_dir}/bin:/usr/bin:/bin"})
    assert found.stdout == "hello\n"
    python = await sbx.exec(["python", "-c", "import sys; print(sys.prefix)"])
    assert python.stdout == f"{sbx.work_dir}/.sandbox-venv\n"


@pytest.mark.spec("C3")
async def test_without_a_pipe_run_returns_at_the_end(sbx: sb.Session) -> None:
    proc = await sbx.run("sleep 0.3; echo out; echo err >&2; exit 3")
    assert proc.returncode == 3
    assert await proc.communicate() == (b"out\n", b"err\n")
    assert [line async for line in proc.iter_stdout_lines()] == ["out"]
    assert [chunk async for chunk in proc.iter_stderr()] == [b"err\n"]
    assert await proc.wait() == 3


@pytest.mark.spec("C3")
@pytest.mark.parametrize("options", [{"stdout": True}, {"stderr": sb.PIPE}, {"stdin": sb.PIPE}])
async def test_with_a_pipe_run_returns_at_the_start(sbx: sb.Session, options: dict) -> None:
    began = time.monotonic()
    proc = await sbx.run("sleep 60", **options)
    assert time.monotonic() - began < SOON_S
    assert proc.returncode is None
    proc.kill()
    assert await proc.wait() == 137


@pytest.mark.spec("C3", "C8")
async def test_background_returns_at_the_start_and_lives_on(sbx: sb.Session) -> None:
    proc = await sbx.run("while :; do echo x >> beats; sleep 0.05; done", background=True)
    assert proc.returncode is None
    assert (await sbx.exec("true")).ok
    first = len((await sbx.exec("cat beats")).stdout)
    async with asyncio.timeout(SOON_S):
        while len((await sbx.exec("cat beats")).stdout) <= first:
            await asyncio.sleep(0.05)
    proc.terminate()
    assert await proc.wait() == 143
    assert proc.termination_reason == "signal"


@pytest.mark.spec("C8")
async def test_background_may_end_by_itself_and_keeps_its_output(sbx: sb.Session) -> None:
    proc = await sbx.run("echo done; exit 4", background=True)
    assert await proc.wait() == 4
    assert await proc.communicate_text() == ("done\n", "")


@pytest.mark.spec("C8", "G4")
async def test_background_ends_at_close(open_session: OpenSession) -> None:
    async with open_session() as session:
        proc = await session.run("setsid sleep 60 & exec sleep 60", background=True)
        assert eventually(lambda: len(sandbox_processes()) >= 2)
    assert not sandbox_processes()
    assert await proc.wait() == 137
    assert proc.termination_reason == "closed"


@pytest.mark.spec("C8")
@pytest.mark.parametrize(
    "leave",
    [
        "sleep 60 &",
        "setsid sleep 60 >/dev/null 2>&1 </dev/null &",
        "(setsid sh -c 'sleep 60 & sleep 60' &) &",
        "trap '' TERM HUP; sleep 60 &",
    ],
)
async def test_background_processes_end_with_their_command(sbx: sb.Session, leave: str) -> None:
    began = time.monotonic()
    result = await sbx.exec(f"{leave} echo done")
    assert (result.stdout, result.returncode) == ("done\n", 0)
    assert time.monotonic() - began < SOON_S
    assert eventually(lambda: not sandbox_processes())


@pytest.mark.spec("C8")
async def test_a_daemon_ends_with_its_command(sbx: sb.Session) -> None:
    code = """
        import os, sys, time
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                time.sleep(60)
            os._exit(0)
        os.wait()
        print("parent done")
    """
    assert await sbx.run_code(code) == "parent done\n"
    assert eventually(lambda: not sandbox_processes())


@pytest.mark.spec("C4")
async def test_python_source_is_a_script(sbx: sb.Session) -> None:
    out = await sbx.run_code(
        """
        import sys, os
        print(__name__, os.path.isfile(__file__), sys.argv == [__file__])
        print(open(__file__).read().count("isfile"))
        print(sys.prefix)
        """
    )
    assert out == f"__main__ True True\n2\n{sbx.work_dir}/.sandbox-venv\n"


@pytest.mark.spec("C4")
async def test_common_indentation_is_removed(sbx: sb.Session) -> None:
    assert await sbx.run_code("\n        if True:\n            print('in')\n        ") == "in\n"
    assert await sbx.run_code("\n\tprint('tab')\n") == "tab\n"
    kept = 'text = """\n  two\n"""\nprint(repr(text))'
    assert await sbx.run_code(kept) == "'\\n  two\\n'\n"


@pytest.mark.spec("C4")
async def test_tracebacks_show_source_lines(sbx: sb.Session) -> None:
    code = """
        def inner():
            raise ValueError("as planned")

        inner()
    """
    result = await sbx.exec(code, script_type="python")
    assert result.returncode == 1
    assert "in inner\n    raise ValueError" in result.stderr
    assert "line 5, in <module>\n    inner()" in result.stderr
    assert result.stderr.endswith("ValueError: as planned\n")


@pytest.mark.spec("C4")
async def test_modules_in_the_work_dir_are_importable(sbx: sb.Session) -> None:
    await sbx.put_bytes("mine.py", b"answer = 42\n")
    await sbx.put_bytes("pack/__init__.py", b"from pack.part import x\n")
    await sbx.put_bytes("pack/part.py", b"x = 7\n")
    assert await sbx.run_code("import mine, pack; print(mine.answer, pack.x)") == "42 7\n"
    shell = await sbx.exec("python -c 'import mine; print(mine.answer)'")
    assert shell.stdout == "42\n"
    assert await sbx.run_code("import part; print(part.x)", cwd="pack") == "7\n"


@pytest.mark.spec("C4")
async def test_multiprocessing_with_spawn_works(sbx: sb.Session) -> None:
    program = """
        import multiprocessing

        def square(n):
            return n * n

        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(2) as pool:
                print(pool.map(square, range(4)))
        """
    if sbx.isolation.shm == "none":  # its locks are files in /dev/shm
        with pytest.raises(sb.SandboxCommandError, match="PermissionError"):
            await sbx.run_code(program)
        return
    assert await sbx.run_code(program) == "[0, 1, 4, 9]\n"


@pytest.mark.spec("C4")
async def test_a_command_of_10_mib(sbx: sb.Session) -> None:
    text = "x='" + "a" * (10 * MIB) + "'\necho ${#x}\n"
    assert (await sbx.exec(text)).stdout == f"{10 * MIB}\n"


@pytest.mark.spec("C4")
@pytest.mark.parametrize("size", [100_000, 119_990, 122_881, 131_072, 200_000])
async def test_commands_around_the_kernels_limit_on_an_argument(sbx: sb.Session, size: int) -> None:
    result = await sbx.exec(f"echo start; : {'é' * (size // 2)}; echo $0-end >&2; exit 7")
    assert (result.stdout, result.returncode) == ("start\n", 7)


@pytest.mark.spec("C4")
async def test_a_script_of_10_mib(sbx: sb.Session) -> None:
    source = "data = '''" + "line\n" * (2 * MIB) + "'''\nprint(len(data))\nraise SystemExit(9)\n"
    result = await sbx.exec(source, script_type="python")
    assert (result.stdout, result.returncode) == (f"{10 * MIB}\n", 9)


@pytest.mark.spec("C4")
async def test_many_scripts_at_once_do_not_mix(sbx: sb.Session) -> None:
    outs = await asyncio.gather(*(sbx.run_code(f"print({n} * 2)") for n in range(6)))
    assert outs == [f"{2 * n}\n" for n in range(6)]


@pytest.mark.spec("C4")
async def test_unicode_in_commands_and_scripts(sbx: sb.Session) -> None:
    assert (await sbx.exec("printf '%s' 'žlutý 🐎'")).stdout == "žlutý 🐎"
    assert await sbx.run_code("print('žlutý 🐎', len('🐎'))") == "žlutý 🐎 1\n"


@pytest.mark.spec("C9", "F2")
@pytest.mark.parametrize("jail", ISOLATED, indirect=True)  # a remote call cannot widen
async def test_the_call_replaces_the_sessions_network(jail: sb.Session) -> None:
    def interfaces(**options: str) -> asyncio.Future[sb.ExecResult]:
        return jail.exec(
            "cat /proc/net/dev | tail -n +3 | wc -l; readlink /proc/self/ns/net", **options
        )

    closed = await interfaces()
    opened = await interfaces(network_mode="open")
    again = await interfaces(network_mode="blocked")
    host = Path("/proc/self/ns/net").readlink()
    assert closed.stdout.splitlines()[0] == again.stdout.splitlines()[0] == "1"
    assert opened.stdout.splitlines()[1] == str(host)
    assert str(host) not in closed.stdout + again.stdout
