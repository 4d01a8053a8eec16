"""The project on aarch64, by qemu-user: unit tests, part of the contract, and the refusals."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.environments import aarch64
from tests.environments.suite import PROJECT
from tests.environments.test_suite_elsewhere import counts

# What depends on the architecture: numbers and flags of calls, layout of messages, file access.
UNIT = ("test_openat2", "test_protocol", "test_netlink", "test_syscalls", "test_launch")
CONTRACT = ("test_basics.py", "test_stdin.py", "test_run.py::test_a_string_is_shell_text")
PYTEST = ("python3", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist")
LIMIT_S = 600.0
PAGE = PROJECT / "docs" / "reference" / "portability.md"
BEGIN, END = "<!-- aarch64: begin -->\n", "<!-- aarch64: end -->\n"
HEAD = "| backend | result |\n|---|---|\n"

LOOK = """\
import asyncio, ctypes, json, os, warnings
warnings.simplefilter("ignore")
from union import sandbox as sb
from union.sandbox._linux import kernel
from union.sandbox._linux.openat2 import has_openat2

async def opened(backend):
    try:
        async with sb.on_device.session(backend=backend) as sbx:
            return (await sbx.exec("uname -m")).stdout
    except sb.SandboxError as error:
        return {"code": error.code, "message": str(error.args[0]), "hint": error.hint}

async def main():
    return {name: await opened(name) for name in ("bubblewrap", "userns", "landlock", "none")}

libc = ctypes.CDLL(None, use_errno=True)
child = libc.syscall(220, 17 | 0x10000000, 0, 0, 0, 0)
if child == 0:
    os._exit(0)
print(json.dumps({
    "machine": kernel.machine(),
    "has": {"namespaces": child > 0, "seccomp": kernel.has_seccomp(), "openat2": has_openat2(),
            "Landlock": kernel.landlock_abi() > 0, "subreaper": libc.prctl(36, 1, 0, 0, 0) == 0},
    "opened": asyncio.run(main()),
}))
"""


@pytest.fixture(autouse=True, scope="module")
def emulator() -> None:
    """Skip all of it where this machine cannot execute programs for aarch64."""
    if (reason := aarch64.lacking()) is not None:
        pytest.skip(reason)


def line(backend: str, found: Any) -> str:
    """Return a row of the page."""
    if isinstance(found, str):
        return f"| `{backend}` | works |\n"
    cause = found["message"].partition(" here: ")[2] or found["message"]
    return f"| `{backend}` | no: {cause.partition(' (')[0]} |\n"


@pytest.mark.elsewhere
@pytest.mark.slow
@pytest.mark.spec("A1")
@pytest.mark.timeout(LIMIT_S)
def test_unit_tests_pass() -> None:
    files = [f"tests/unit/{name}.py" for name in UNIT]
    done = aarch64.run([*PYTEST, *files], timeout_s=LIMIT_S - 10)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    assert counts(done.stdout)["passed"] > 100, done.stdout
    assert done.left_behind == 0


@pytest.mark.elsewhere
@pytest.mark.slow
@pytest.mark.spec("A1", "G1")
@pytest.mark.timeout(LIMIT_S)
def test_part_of_the_contract_holds() -> None:
    """Of `none` with the portable engine: its launcher needs no call that the emulator lacks."""
    files = [f"tests/contract/{name}" for name in CONTRACT]
    command = [*PYTEST, "-p", "no:anyio", "--only-way", "none", *files]
    done = aarch64.run(command, portable=True, timeout_s=LIMIT_S - 10)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    assert counts(done.stdout)["passed"] > 20, done.stdout
    assert done.left_behind == 0


@pytest.mark.elsewhere
@pytest.mark.slow
@pytest.mark.spec("P4", "G1", "B9")
@pytest.mark.threat(114)
@pytest.mark.timeout(LIMIT_S)
def test_no_sandbox_opens_without_its_layers() -> None:
    """Each backend of Linux is refused, with the cause, where the emulator lacks what it needs."""
    done = aarch64.run(["python3", "-c", LOOK], timeout_s=LIMIT_S - 10)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["machine"] == "aarch64"
    if any(found["has"].values()):
        pytest.skip(f"this qemu-user has more than the one that the page is about: {found['has']}")
    opened = found["opened"]
    for backend in ("bubblewrap", "userns", "landlock"):
        assert opened[backend]["code"] == "backend-unavailable", opened[backend]
        assert opened[backend]["hint"]
    assert "image for this machine's own architecture" in opened["userns"]["hint"]
    assert opened["none"]["code"] == "spawn-EINVAL"
    page = PAGE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0]
    assert page == HEAD + "".join(line(*item) for item in opened.items())
