"""The environment and the working directory of a command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.conftest import WAYS, host_dir

from union import sandbox as sb

if TYPE_CHECKING:
    from tests.conftest import OpenSession

SHOW = "import json, os; print(json.dumps(dict(os.environ)))"


async def environment(session: sb.Session, **options: object) -> dict[str, str]:
    return json.loads(await session.run_code(SHOW, **options))


@pytest.mark.spec("C5")
async def test_the_environment_is_small_and_clean(sbx: sb.Session, monkeypatch) -> None:
    monkeypatch.setenv("CONTRACT_SECRET", "hunter2")
    monkeypatch.setenv("PYTHONPATH", "/nonexistent")
    monkeypatch.setenv("LD_PRELOAD_X", "x")
    found = await environment(sbx)
    assert "hunter2" not in str(found)
    venv = f"{sbx.work_dir}/.sandbox-venv"
    assert found["PATH"].split(":")[0] == f"{venv}/bin"
    assert found["HOME"] == sbx.work_dir
    if sbx.isolation.tmp == "directory":
        assert found["TMPDIR"].endswith("/tmp")
        assert found["TMPDIR"] != "/tmp"
    else:
        assert found["TMPDIR"] == "/tmp"
    assert found["VIRTUAL_ENV"] == venv
    assert "UTF-8" in found["LANG"]
    assert "UTF-8" in found["LC_ALL"]
    assert found["TERM"]
    allowed = {
        "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "TMPDIR", "TERM",
        "VIRTUAL_ENV", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE",
        "GIT_SSL_CAINFO", "NODE_EXTRA_CA_CERTS", "PIP_CERT", "SANDBOX_NETWORK", "UV_HTTP_RETRIES",
        "GIT_CONFIG_NOSYSTEM", "EMAIL",
    }  # fmt: skip
    assert set(found) <= allowed


@pytest.mark.spec("C5")
async def test_the_calls_env_wins_over_the_sessions(open_session: OpenSession) -> None:
    async with open_session(env={"A": "session", "B": "session", "HOME": "/tmp"}) as session:
        found = await environment(session, env={"B": "call", "C": "call"})
        assert (found["A"], found["B"], found["C"]) == ("session", "call", "call")
        assert found["HOME"] == "/tmp"
        again = await environment(session)
        assert (again["A"], again["B"]) == ("session", "session")
        assert "C" not in again


@pytest.mark.spec("C5")
@pytest.mark.parametrize(
    "value", ["", " ", "a=b", "new\nline", "žluť 🐎", "$HOME `x`", "x" * 100_000]
)
async def test_values_arrive_unchanged(sbx: sb.Session, value: str) -> None:
    assert (await environment(sbx, env={"VALUE": value}))["VALUE"] == value


@pytest.mark.spec("C5")
async def test_unusual_names_and_bytes(sbx: sb.Session) -> None:
    proc = await sbx.run(
        ["env", "-0"], env={"a.b-c": "1", "raw": b"\xff\xfe".decode("utf-8", "surrogateescape")}
    )
    out, _ = await proc.communicate()
    pairs = out.split(b"\0")
    assert b"a.b-c=1" in pairs
    assert b"raw=\xff\xfe" in pairs


@pytest.mark.spec("C5")
async def test_changing_the_mapping_later_changes_nothing(open_session: OpenSession) -> None:
    env = {"A": "first"}
    async with open_session(env=env) as session:
        env["A"] = "second"
        assert (await environment(session))["A"] == "first"


@pytest.mark.spec("C5")
@pytest.mark.parametrize("name", ["SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "PIP_CERT"])
@pytest.mark.parametrize("way", WAYS)  # a server has an environment of its own
async def test_a_companys_certificate_is_carried_in(
    open_session: OpenSession, tmp_path: Path, monkeypatch, name: str
) -> None:
    bundle = tmp_path / "company.pem"
    bundle.write_text("certificate")
    monkeypatch.setenv(name, str(bundle))
    async with open_session() as session:
        result = await session.exec(f'echo "${name}"; cat "${name}"; ls -A {tmp_path}')
        assert result.stdout.startswith(f"{bundle}\ncertificate")
        assert result.ok


@pytest.mark.spec("C6")
async def test_the_default_is_the_work_dir(sbx: sb.Session) -> None:
    assert (await sbx.exec("pwd -P")).stdout == f"{sbx.work_dir}\n"
    assert await sbx.run_code("import os; print(os.getcwd())") == f"{sbx.work_dir}\n"


@pytest.mark.spec("C6")
async def test_relative_paths_resolve_under_the_work_dir(sbx: sb.Session) -> None:
    await sbx.put_bytes("a/b/f", b"x")
    for cwd in ("a/b", "./a//b/", "a/./b", Path("a/b"), f"{sbx.work_dir}/a/b"):
        assert (await sbx.exec("pwd", cwd=cwd)).stdout == f"{sbx.work_dir}/a/b\n", cwd
    assert (await sbx.exec("pwd", cwd=".")).stdout == f"{sbx.work_dir}\n"


@pytest.mark.spec("C6")
async def test_an_absolute_path_that_is_visible(sbx: sb.Session) -> None:
    for cwd in ("/tmp", "/usr", "/etc", "/"):
        assert (await sbx.exec("pwd", cwd=cwd)).stdout == f"{cwd}\n"


@pytest.mark.spec("C6", "C10")
@pytest.mark.parametrize("cwd", ["missing", "/nonexistent/place", "file", "file/below"])
async def test_a_missing_one_is_named(sbx: sb.Session, cwd: str) -> None:
    await sbx.put_bytes("file", b"")
    with pytest.raises(sb.SandboxUsageError) as caught:
        await sbx.run("touch ran", cwd=cwd, stdout=True)
    assert cwd in str(caught.value)
    assert caught.value.argument == "cwd"
    assert not Path(host_dir(sbx), "ran").exists()
    assert (await sbx.exec("echo usable")).stdout == "usable\n"


@pytest.mark.spec("C6")
async def test_a_host_directory_is_not_visible(jail: sb.Session, tmp_path: Path) -> None:
    with pytest.raises(sb.SandboxUsageError, match="inside the sandbox"):
        await jail.exec("pwd", cwd=str(tmp_path))


@pytest.mark.spec("C6", "C10")
@pytest.mark.parametrize("cwd", ["..", "../..", "a/../../..", "a/..", "./..", Path("../x")])
async def test_relative_paths_do_not_climb(sbx: sb.Session, cwd: str | Path) -> None:
    await sbx.put_bytes("a/f", b"")
    for options in ({}, {"stdout": True}, {"script_type": "python"}):
        with pytest.raises(sb.SandboxUsageError) as caught:
            await sbx.run("touch ran", cwd=cwd, **options)  # type: ignore[arg-type]
        assert caught.value.argument == "cwd"
        assert str(cwd) in str(caught.value)
        assert "without '..'" in str(caught.value)
    assert not Path(host_dir(sbx), "ran").exists()


@pytest.mark.spec("C6")
async def test_a_path_of_the_call_can_be_its_cwd(jail: sb.Session, tmp_path: Path) -> None:
    with pytest.raises(sb.SandboxUsageError, match=str(tmp_path)):
        await jail.exec("pwd", cwd=str(tmp_path))
    shown = await jail.exec("pwd", cwd=str(tmp_path), read_only_paths=[str(tmp_path)])
    assert shown.stdout == f"{tmp_path}\n"
