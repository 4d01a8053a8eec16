"""The blocks of the documents as written, on a server and in ``sb.session()``.

The documents open their sessions with ``sb.on_device.session(...)`` and promise that the same code
runs elsewhere when that is replaced. Only the name of that call is replaced here, and the index of
packages is a directory of wheels.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import flyte
import pytest
from tests.contract.test_venv import wheel
from tests.servers import ServerProcess

from union import sandbox as sb

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.spec("I2", "I4", "I8"), pytest.mark.timeout(120)]
PLACE = "/var/tmp"

QUICKSTART = """
async with SESSION(backend="userns") as sbx:
    proc = await sbx.run("uname -a", stdout=True)
    out, _ = await proc.communicate_text()
    print(out)
assert out.startswith("Linux")
"""
INVOLVED = '''
with tempfile.TemporaryDirectory(dir=PLACE) as work:
    WRITE_DATA = f"""
import json, pathlib
pathlib.Path("{work}/data.json").write_text(json.dumps([1, 2, 3, 4]))
"""
    COMPUTE = f"""
import json, statistics, requests   # the install from step 2 is visible here
data = json.loads(open("{work}/data.json").read())
print(f"requests={{requests.__version__}} mean={{statistics.mean(data)}}")
"""
    # Session-level network_mode sets the ceiling of what any run() can
    # reach. Per-call run(network_mode="blocked") narrows from there.
    async with SESSION(
        backend="userns",
        host_work_dir=work,                 # pin the work dir so we can interpolate it
        network_mode="allowlist",
        network_allowlist=sb.PYPI_HOSTS,
        env=INDEX, read_only_paths=[WHEELS],
    ) as sbx:
        # 1. Write a file to the work dir (persists). Tighten to blocked.
        await sbx.run(WRITE_DATA, script_type="python", network_mode="blocked")

        # 2. Install into the shared session venv (uses the allow-list default).
        await sbx.run("uv pip install requests")

        # 3. Back to blocked. Use the file from step 1 and the package from step 2.
        out = await sbx.run_code(COMPUTE, network_mode="blocked")
        print(out.strip())  # e.g. "requests=2.32.3 mean=2.5"
assert out.strip() == "requests=2.32.3 mean=2.5"
'''
AGENT = """
env_key = "key"
with tempfile.TemporaryDirectory(dir=PLACE) as work:
    async with SESSION(
        host_work_dir=work,                       # pin so we can interpolate paths
        network_mode="allowlist",
        network_allowlist=["api.anthropic.com"],  # the model endpoint
        backend="userns",
        timeout_s=1200,
    ) as sbx:
        # 1. Stage inputs into the work dir.
        await sbx.put_bytes(f"{work}/data.csv", _CSV)
        await sbx.put_bytes(f"{work}/driver.py", _driver(work).encode())

        # 2. Run the agent's driver. Its tool loop writes Python, executes
        #    it in the sandbox, and iterates until it writes answer.json.
        proc = await sbx.run(
            f"python {work}/driver.py",
            env={"ANTHROPIC_API_KEY": env_key},   # see the secret note below
            stdout=True, stderr=True, timeout_s=600,
        )
        out, err = await proc.communicate_text()
        assert proc.returncode == 0, f"agent failed rc={proc.returncode}\\n{err}"

        # 3. Collect the result.
        answer = await sbx.get_bytes(f"{work}/answer.json")
assert answer == b'{"sum": 42}'
"""
COMMANDS = '''
async with SESSION(backend="userns") as sbx:
    proc = await sbx.run(
        "python -c 'import os; print(os.uname())'",
        stdout=True,                                    # PIPE | INHERIT | DEVNULL | False
        stderr=True,
        env={"FOO": "bar"},
        cwd="/tmp",                                     # under the sandbox work dir
        script_type="shell",                            # "shell" | "python"
        network_mode="allowlist",                       # "blocked" | "open" | "allowlist"
        network_allowlist=["index.example", "*.files.example"],
        timeout_s=30,
    )
    out, err = await proc.communicate_text()
    assert out.startswith("posix.uname_result"), err

    result = await sbx.exec("ls -la")
    result.returncode   # int
    result.stdout       # decoded str
    result.stderr       # decoded str
    result.ok           # True when returncode == 0
    assert result.ok

    try:
        result = await sbx.exec("false", check=True)   # raises SandboxCommandError on non-zero
    except sb.SandboxCommandError as err:
        assert err.result.stderr == ""
    else:
        raise AssertionError

    out = await sbx.run_code("print(2 + 2)")   # "4\\n"
    assert out == "4\\n"

    proc = await sbx.run("my-command", stdout=True, stderr=True)

    # 1. Drain everything at once (bytes)
    out, err = await proc.communicate()
    assert b"my-command" in err

    # 2. Drain everything at once, decoded to str
    out, err = await proc.communicate_text()
    assert "my-command" in err

    # 3. Stream lines as they arrive
    async for line in proc.iter_stdout_lines():
        print(line)
    async for line in proc.iter_stderr_lines():
        print(line)

    proc.returncode          # int exit code (None until it exits)
    proc.runtime_ms          # wall-clock execution time
    proc.backend             # "bubblewrap" | "userns" | "sandbox-exec" | "none"
    proc.termination_reason  # "" on a clean exit, otherwise a reason string
    assert (proc.returncode, proc.backend, proc.termination_reason) == (127, "userns", "")

    proc = await sbx.run(
        """
        import json, pathlib
        data = json.loads(pathlib.Path("/tmp/my-job/in.json").read_text())
        print(sum(data["values"]))
        """,
        script_type="python",
        stdout=True,
    )
    await proc.communicate()
    assert proc.returncode == 1    # there is no such job

    proc = await sbx.run("exit 5", stdout=True)
    await proc.communicate()
    print(proc.returncode)   # 5, no exception raised
    assert proc.returncode == 5

    await sbx.put_bytes("attempt.py", b"assert 1 == 2")
    proc = await sbx.run("python attempt.py", stdout=True, stderr=True)
    out, err = await proc.communicate_text()
    if proc.returncode != 0:
        feedback = err          # hand this back to the agent and let it retry
    assert "AssertionError" in feedback
'''
INSTALLS = """
async with SESSION(
    backend="userns",
    network_mode="allowlist",
    network_allowlist=sb.PYPI_HOSTS,
    env=INDEX, read_only_paths=[WHEELS],
) as sbx:
    await sbx.run("uv pip install requests") # lands in the session venv
    out = await sbx.run_code("import requests; print(requests.__version__)")
assert out == "2.32.3\\n"
"""
BLOCKS = {
    "quickstart": QUICKSTART,
    "more involved": INVOLVED,
    "agent": AGENT,
    "commands": COMMANDS,
    "installs": INSTALLS,
}
_CSV = b"name,value\na,1\nb,2\nc,39\n"


def _driver(work: str) -> str:
    return f"""
import csv, json, os
assert os.environ["ANTHROPIC_API_KEY"] == "key"
total = sum(int(row["value"]) for row in csv.DictReader(open("{work}/data.csv")))
open("{work}/answer.json", "w").write(json.dumps({{"sum": total}}))
"""


@pytest.fixture(scope="module")
def wheels() -> Iterator[str]:
    with tempfile.TemporaryDirectory(dir=PLACE) as folder:
        name, data = wheel("requests", "2.32.3", "__version__ = '2.32.3'\n")
        Path(folder, name).write_bytes(data)
        os.chmod(folder, 0o755)
        yield folder


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess("--backend", "userns", "--allow-path", PLACE) as found:
        yield found


async def run_block(text: str, session: Any, wheels: str) -> None:
    source = "async def block():\n" + _indented(text)
    index = {"UV_OFFLINE": "1", "UV_NO_INDEX": "1", "UV_FIND_LINKS": wheels}
    names = {
        "SESSION": session, "INDEX": index, "WHEELS": wheels, "PLACE": PLACE, "sb": sb,
        "tempfile": tempfile, "_CSV": _CSV, "_driver": _driver,
    }  # fmt: skip
    exec(compile(source, "<document>", "exec"), names)
    await names["block"]()  # type: ignore[operator]  # it was just made


def _indented(text: str) -> str:
    """Indent code, but not the lines of multi-line strings."""
    if '"""' not in text:
        return textwrap.indent(text, "    ")
    parts = text.split('"""')
    found = textwrap.indent(parts[0], "    ")
    for number, part in enumerate(parts[1:], 1):
        first, newline, rest = part.partition("\n")
        inside = number % 2 == 1
        found += '"""' + (part if inside else first + newline + textwrap.indent(rest, "    "))
    return found


@pytest.mark.parametrize("name", BLOCKS)
async def test_on_a_server(name: str, server: ServerProcess, wheels: str):
    def session(**options: Any) -> sb.Session:
        return sb.remote.session(endpoint=server.endpoint, token=server.token, **options)

    await run_block(BLOCKS[name], session, wheels)


# The second spelling opens a session and nothing more: one block is enough.
SPELLINGS = [
    *((name, "async with") for name in BLOCKS),
    *((name, "async with await") for name in list(BLOCKS)[:1]),
]


@pytest.mark.parametrize("name, spelling", SPELLINGS)
async def test_in_a_session_of_its_own(name: str, spelling: str, wheels: str):
    text = BLOCKS[name]
    if spelling == "async with await":
        text = text.replace("async with SESSION", "async with await SESSION")
    await run_block(text, sb.session, wheels)


env = flyte.TaskEnvironment(name="documents-elsewhere")


@env.task
async def blocks(wheels: str) -> int:
    for text in BLOCKS.values():
        await run_block(text, sb.session, wheels)
    return len(BLOCKS)


async def test_in_a_task_in_flytes_local_mode(wheels: str):
    run = await flyte.with_runcontext(mode="local").run.aio(blocks, wheels=wheels)
    assert (await run.outputs.aio())[0] == len(BLOCKS)


def test_a_child_of_a_plain_program_gets_a_reference(own_home: Path):
    """The parent and its children, by ``python my_agent.py`` without a run."""
    from tests.cluster.test_documents import FAMILY

    (own_home / "program.py").write_text(f"{FAMILY}\nprint(asyncio.run(parent()))\n")
    done = subprocess.run(
        [sys.executable, "program.py"],
        check=False,
        capture_output=True,
        text=True,
        timeout=110,
        cwd=own_home,
        env=dict(os.environ),
    )
    assert done.returncode == 0, done.stderr
    assert "'one\\n', 'returncode': 0" in done.stdout
    assert "nclosed" not in done.stderr
