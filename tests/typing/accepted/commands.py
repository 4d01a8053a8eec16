"""Commands with every argument, and what they return."""

from __future__ import annotations

from pathlib import Path
from typing import Any, assert_type

import flyte

from union import sandbox as sb


async def run(sbx: sb.Session, script: sb.ScriptType, mode: sb.NetworkMode | None) -> None:
    process = await sbx.run(
        ["make", "-j2"],
        stdout=sb.PIPE,
        stderr=True,
        stdin=b"input",
        env={"A": "b"},
        cwd=Path("below"),
        script_type="shell",
        network_mode="allowlist",
        network_allowlist=["example.org"],
        timeout_s=1.5,
        background=False,
        pty=False,
        max_output_bytes=1 << 20,
        resources=sb.Resources(memory="64Mi"),
        read_only_paths=["/srv/data"],
        read_write_paths=[Path("/srv/out")],
    )
    assert_type(process, sb.SandboxProcess)
    assert_type(process.returncode, int | None)
    assert_type(process.termination_reason, sb.TerminationReason)
    assert_type(await process.wait(), int)
    assert_type(await process.communicate(), tuple[bytes, bytes])
    async for line in process.iter_stdout_lines():
        assert_type(line, str)
    decisions: list[sb.Decision] = list(process.network)
    assert decisions is not None
    await sbx.run("true", script_type=script, network_mode=mode)


async def others(sbx: sb.Session) -> None:
    result = await sbx.exec("true", check=True, timeout_s=3, resources=flyte.Resources(cpu=1))
    assert_type(result, sb.ExecResult)
    assert_type(result.stdout, str)
    if result.termination_reason == "timeout":
        print(result.runtime_ms)
    text = await sbx.run_code(
        "print(1)",
        stdin=b"",
        env={"A": "b"},
        cwd="below",
        network_mode="blocked",
        timeout_s=3,
        max_output_bytes=10,
        resources=sb.Resources(memory="64Mi"),
        read_only_paths=["/srv/data"],
    )
    assert_type(text, str)
    options: dict[str, Any] = {"timeout_s": 3}
    assert_type(await sbx.run_code("print(1)", **options), str)


async def files(sbx: sb.Session) -> None:
    assert_type(await sbx.put_bytes("a", b"x"), int)
    assert_type(await sbx.get_bytes("a"), bytes)
    assert_type(await sbx.list_dir(), tuple[sb.FileInfo, ...])
    assert_type(await sbx.upload(Path("a"), "b"), sb.Transfer)
