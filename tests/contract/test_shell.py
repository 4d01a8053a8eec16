"""Commands that models type work inside: bash, pip, git, Java, the time zone."""

from __future__ import annotations

import glob
import os
import re
import shutil
import time
from typing import TYPE_CHECKING

import pytest
from tests.contract.test_venv import wheel

from union.sandbox.errors import SandboxUsageError

if TYPE_CHECKING:
    from tests.conftest import OpenSession

    from union import sandbox as sb

HAS_BASH = os.path.exists("/bin/bash")
needs_bash = pytest.mark.skipif(not HAS_BASH, reason="bash is not installed: apt-get install bash")


@needs_bash
@pytest.mark.spec("C12")
async def test_text_runs_in_bash(sbx: sb.Session):
    assert sbx.shell == "/bin/bash"
    await sbx.put_bytes("settings.sh", b"colour=green\n")
    result = await sbx.exec(
        "source settings.sh; words=(a b); [[ $colour == g* ]] && echo ${words[1]}"
    )
    assert (result.stdout, result.stderr) == ("b\n", "")
    long = f"# {'x' * 200_000}\necho ${{BASH_VERSION:+bash}}"
    assert (await sbx.exec(long)).stdout == "bash\n"


@pytest.mark.spec("C12")
async def test_the_shell_can_be_chosen(open_session: OpenSession):
    async with open_session(shell="sh") as session:
        assert session.shell == "/bin/sh"
        assert (await session.exec("echo $0 ${BASH_VERSION:-none}")).stdout == "sh none\n"
    if HAS_BASH:
        async with open_session(shell="bash") as session:
            assert (await session.exec("type -t cd")).stdout == "builtin\n"
    with pytest.raises(SandboxUsageError, match="shell must be one of 'bash', 'sh', not 'zsh'"):
        open_session(shell="zsh")


@pytest.mark.spec("C12")
async def test_the_work_dir_has_no_start_file_of_the_shell(sbx: sb.Session):
    await sbx.put_bytes(".bashrc", b"echo read\n")
    process = await sbx.run("echo $((1 + 1))", stdin=b"")
    assert await process.communicate() == (b"2\n", b"")


@pytest.mark.spec("C12")
@pytest.mark.parametrize("pip", ["pip", "pip3", "python -m pip", "python3 -m pip", "uv pip"])
async def test_every_spelling_of_pip_installs_into_the_session(sbx: sb.Session, pip: str):
    name, data = wheel("spelledpkg", "1.0", "x = 7\n")
    await sbx.put_bytes(name, data)
    quiet = "" if pip == "uv pip" else "--disable-pip-version-check --user"
    result = await sbx.exec(f"{pip} install {quiet} --no-index ./{name}")
    assert result.returncode == 0, result.stderr
    assert await sbx.run_code("import spelledpkg; print(spelledpkg.x)") == "7\n"
    assert "spelledpkg" in (await sbx.exec(f"{pip} list")).stdout
    gone = await sbx.exec(f"{pip} uninstall {'' if pip == 'uv pip' else '-y'} spelledpkg")
    assert gone.returncode == 0, gone.stderr


@pytest.mark.spec("C12")
async def test_the_front_of_pip_explains_itself(sbx: sb.Session):
    assert "uv pip" in (await sbx.exec("pip --version")).stdout
    assert "usage: pip" in (await sbx.exec("pip help")).stdout
    result = await sbx.exec("pip download six")
    assert (result.returncode, result.stdout) == (2, "")
    assert "unknown command 'download'" in result.stderr


@pytest.mark.spec("C12")
async def test_pip_lists_the_packages_of_the_caller_too(sbx: sb.Session):
    if await sbx.run_code("import importlib.util as u; print(u.find_spec('pytest'))") == "None\n":
        pytest.skip("this session runs where the packages of the tests are not installed")
    rows = dict(row.split() for row in (await sbx.exec("pip list")).stdout.splitlines())
    assert rows["pytest"] == pytest.__version__
    shown = await sbx.exec("pip show pytest no-such-package")
    assert f"Name: pytest\nVersion: {pytest.__version__}\n" in shown.stdout
    assert (shown.returncode, "no-such-package" in shown.stderr) == (0, True)
    assert (await sbx.exec("pip show no-such-package")).returncode == 1


@pytest.mark.spec("C12")
@pytest.mark.parametrize("pip", ["pip", "uv pip"])
async def test_an_install_without_network_fails_at_once_with_the_reason(sbx: sb.Session, pip: str):
    if sbx.backend == "none":
        pytest.skip("backend='none' blocks no network")
    result = await sbx.exec(f"{pip} install no-such-package-anywhere", timeout_s=60)
    assert result.returncode not in {0, 143}
    assert not re.search("retry|retries", result.stderr, re.IGNORECASE)
    assert "network_mode='allowlist', network_allowlist=PYPI_HOSTS" in result.stderr
    assert "sbx run --allow-pypi" in result.stderr
    # A failure that is not about the network has no such note.
    result = await sbx.exec(f"{pip} install --no-index no-such-package-anywhere")
    assert result.returncode != 0
    assert "network_mode" not in result.stderr


@pytest.mark.spec("C12")
async def test_git_works_in_the_work_dir(sbx: sb.Session):
    if shutil.which("git") is None:
        pytest.skip("git is not installed: apt-get install git")
    # Without a private root the name is that of the host's account, which may have none.
    named = "" if sbx.backend in {"userns", "bubblewrap"} else "-c user.name=sandbox"
    made = await sbx.exec(
        f"git init -q && echo 1 > a && git add a && git {named} commit -qm first && "
        "git log --format='%s %an %ae'"
    )
    expected = "first sandbox sandbox@localhost\n"
    assert (made.stdout, made.returncode) == (expected, 0), made.stderr
    again = await sbx.exec(
        f"git config user.email own@example.com && git {named} commit -q --amend --reset-author "
        "-m second && git log --format='%s %ae'"
    )
    assert again.stdout == "second own@example.com\n", "configuration has precedence"


@pytest.mark.spec("C12")
async def test_java_finds_its_settings(sbx: sb.Session):
    if shutil.which("java") is None:
        pytest.skip("java is not installed: apt-get install default-jre-headless")
    wanted = [*glob.glob("/etc/java-*"), "/etc/alternatives/java"]
    assert (await sbx.exec(["ls", "-d", *wanted])).stdout.split() == sorted(wanted)
    result = await sbx.exec("java -Xmx64m -XX:+UseSerialGC -version", timeout_s=60)
    assert result.returncode == 0, result.stderr


@pytest.mark.spec("C12")
async def test_the_locale_is_utf8_and_the_time_zone_is_the_hosts(sbx: sb.Session):
    code = "import locale, time; print(locale.getpreferredencoding(), time.tzname[0])"
    here = time.tzname[0] if "TZ" not in os.environ else None
    encoding, zone = (await sbx.run_code(code)).split()
    assert encoding.upper().replace("-", "") == "UTF8"
    assert here is None or zone == here
