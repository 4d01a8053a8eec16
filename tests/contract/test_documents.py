"""The programs of the documents, as they are written there; an index is a directory of wheels."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

import pytest
from tests.contract.test_venv import wheel

from union import sandbox as sb
from union.sandbox import SandboxExecutionError

_CSV = b"name,value\na,1\nb,2\nc,39\n"


def _index(where: str) -> dict[str, str]:
    """An index without a network: settings for ``uv`` that make the documented command work."""
    name, data = wheel("requests", "2.32.3", "__version__ = '2.32.3'\n")
    Path(where, name).write_bytes(data)
    return {"UV_OFFLINE": "1", "UV_NO_INDEX": "1", "UV_FIND_LINKS": where}


@pytest.mark.spec("B1", "D1")
async def test_quickstart() -> None:
    async with sb.on_device.session(backend="userns") as sbx:
        proc = await sbx.run("uname -a", stdout=True)
        out, _ = await proc.communicate_text()
    assert out.startswith("Linux")


@pytest.mark.spec("B1", "B2")
async def test_managing_the_lifetime_yourself() -> None:
    sbx = await sb.on_device.session(backend="userns").open()
    try:
        proc = await sbx.run("uname -a", stdout=True)
        out, _ = await proc.communicate_text()
    finally:
        await sbx.close()
    assert out.startswith("Linux")


@pytest.mark.spec("B3", "B4", "B5", "C3", "C9")
async def test_the_more_involved_example() -> None:
    with tempfile.TemporaryDirectory() as work:
        WRITE_DATA = f"""
import json, pathlib
pathlib.Path("{work}/data.json").write_text(json.dumps([1, 2, 3, 4]))
"""  # noqa: N806 - as in the document
        COMPUTE = f"""
import json, statistics, requests   # the install from step 2 is visible here
data = json.loads(open("{work}/data.json").read())
print(f"requests={{requests.__version__}} mean={{statistics.mean(data)}}")
"""  # noqa: N806 - as in the document
        async with sb.on_device.session(
            backend="userns",
            host_work_dir=work,
            network_mode="allowlist",
            network_allowlist=sb.PYPI_HOSTS,
            env=_index(work),
        ) as sbx:
            await sbx.run(WRITE_DATA, script_type="python", network_mode="blocked")
            await sbx.run("uv pip install requests")
            out = await sbx.run_code(COMPUTE, network_mode="blocked")
    assert out.strip() == "requests=2.32.3 mean=2.5"


def _driver(work: str) -> str:
    return f"""
import csv, json, os, subprocess, sys
assert os.environ["ANTHROPIC_API_KEY"] == "key"
attempt = "import csv; print(sum(int(r['value']) for r in csv.DictReader(open('{work}/data.csv'))))"
for turn, code in enumerate(["raise SystemExit('first try')", attempt]):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode == 0:
        answer = {{"answer": int(done.stdout), "turns": turn + 1}}
        json.dump(answer, open("{work}/answer.json", "w"))
        break
"""


@pytest.mark.spec("B3", "E1", "C5", "C7")
async def test_the_shape_of_an_agent_loop() -> None:
    with tempfile.TemporaryDirectory() as work:
        async with sb.on_device.session(
            host_work_dir=work,
            network_mode="allowlist",
            network_allowlist=["api.anthropic.com"],
            backend="userns",
            timeout_s=1200,
        ) as sbx:
            await sbx.put_bytes(f"{work}/data.csv", _CSV)
            await sbx.put_bytes(f"{work}/driver.py", _driver(work).encode())
            proc = await sbx.run(
                f"python {work}/driver.py",
                env={"ANTHROPIC_API_KEY": "key"},
                stdout=True,
                stderr=True,
                timeout_s=600,
            )
            _, err = await proc.communicate_text()
            assert proc.returncode == 0, f"agent failed rc={proc.returncode}\n{err}"
            assert await sbx.get_bytes(f"{work}/answer.json") == b'{"answer": 42, "turns": 2}'


@pytest.mark.spec("D4")
async def test_a_failing_command_is_signal_not_an_error() -> None:
    async with sb.on_device.session(backend="userns") as sbx:
        await sbx.put_bytes("attempt.py", b"assert 1 == 2, 'wrong'\n")
        proc = await sbx.run("python attempt.py", stdout=True, stderr=True)
        _, err = await proc.communicate_text()
        assert proc.returncode != 0
        assert "AssertionError: wrong" in err


@pytest.mark.spec("C1", "C9")
async def test_the_run_example_with_every_argument() -> None:
    async with sb.on_device.session(backend="userns") as sbx:
        proc = await sbx.run(
            "python -c 'import os; print(os.uname())'",
            stdout=True,
            stderr=True,
            env={"FOO": "bar"},
            cwd="/tmp",
            script_type="shell",
            network_mode="allowlist",
            network_allowlist=["index.example", "*.files.example"],
            timeout_s=30,
        )
        out, err = await proc.communicate_text()
        assert out.startswith("posix.uname_result(sysname='Linux'"), err


@pytest.mark.spec("D5")
async def test_one_shot_commands() -> None:
    async with sb.on_device.session(backend="userns") as sbx:
        result = await sbx.exec("ls -la")
        assert (result.returncode, result.ok, result.stderr) == (0, True, "")
        assert "total" in result.stdout
        with pytest.raises(sb.SandboxCommandError):
            await sbx.exec("false", check=True)
        assert await sbx.run_code("print(2 + 2)") == "4\n"


@pytest.mark.spec("D1", "D2", "D6")
async def test_reading_output() -> None:
    async with sb.on_device.session(backend="userns") as sbx:
        proc = await sbx.run("seq 3; seq 4 5 >&2", stdout=True, stderr=True)
        lines = [line async for line in proc.iter_stdout_lines()]
        lines += [line async for line in proc.iter_stderr_lines()]
        assert lines == ["1", "2", "3", "4", "5"]
        await proc.wait()
        assert (proc.returncode, proc.backend, proc.termination_reason) == (0, "userns", "")
        assert proc.runtime_ms > 0


@pytest.mark.spec("C4")
async def test_script_versus_shell(tmp_path: Path) -> None:
    (tmp_path / "in.json").write_text('{"values": [1, 2, 3]}')
    async with sb.on_device.session(backend="userns", host_work_dir=str(tmp_path)) as sbx:
        proc = await sbx.run(
            f"""
    import json, pathlib
    data = json.loads(pathlib.Path("{tmp_path}/in.json").read_text())
    print(sum(data["values"]))
    """,
            script_type="python",
            stdout=True,
        )
        assert await proc.communicate_text() == ("6\n", "")


@pytest.mark.spec("B5", "C3")
async def test_install_is_just_a_run(tmp_path: Path) -> None:
    async with sb.on_device.session(
        backend="userns",
        network_mode="allowlist",
        network_allowlist=sb.PYPI_HOSTS,
        read_only_paths=[str(tmp_path)],
        env=_index(str(tmp_path)),
    ) as sbx:
        await sbx.run("uv pip install requests")
        out = await sbx.run_code("import requests; print(requests.__version__)")
    assert out == "2.32.3\n"


@pytest.mark.spec("D4")
async def test_errors_versus_non_zero_exits() -> None:
    async with sb.on_device.session(backend="userns") as sbx:
        proc = await sbx.run("exit 5", stdout=True)
        await proc.communicate()
        assert proc.returncode == 5
        proc = await sbx.run(["true", *["x" * 100_000] * 100], stdout=True)  # cannot be started
        seen = None
        with contextlib.suppress(AssertionError):
            try:
                await proc.communicate()
            except SandboxExecutionError as e:
                seen = (e.returncode, e.backend, bool(e.reason), e.runtime_ms > 0)
        assert seen == (-1, "userns", True, True)
