"""Sessions of ``sandbox-exec``, with the stand-in that enforces their profiles on Linux."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.portable.differences import DOCUMENTS, SANDBOX_EXEC
from tests.portable.engine import ROOT, Engine, stand_in

if TYPE_CHECKING:
    import subprocess

HEAD = """\
import asyncio, http.server, json, os, socket, sys, threading, time
from union import sandbox as sb

def session(**options):
    return sb.on_device.session(backend="sandbox-exec", **options)

async def error_of(work):
    try:
        await work
    except sb.SandboxError as error:
        return [error.code, str(error.args[0]), error.hint]

def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] != "Z"
"""


def run(engine: Engine, body: str) -> Any:
    lines = "\n".join("    " + line for line in body.strip().splitlines())
    program = f"{HEAD}\nasync def main(found):\n{lines}\n\nfound = {{}}\nasyncio.run(main(found))\n"
    done = engine.python("-W", "ignore", "-c", program + "print(json.dumps(found))")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text("secret")
    return path


@pytest.mark.spec("P3", "G1", "G5")
def test_a_session_reads_writes_and_reports(engine: Engine, secret: Path) -> None:
    found = run(
        engine,
        f"""
async with session() as sbx:
    found["python"] = await sbx.run_code("print(6 * 7)")
    result = await sbx.exec("cat {secret}; echo x > {secret}; echo kept > mine; cat mine")
    found["stdout"], found["stderr"] = result.stdout, result.stderr
    found["tmp"] = (await sbx.exec('echo x > "$TMPDIR/x" && cat "$TMPDIR/x"')).stdout
    proc = await sbx.run("tty >/dev/null && stty size", pty=(5, 6))
    found["terminal"] = (await proc.communicate())[0].decode()
    found["isolation"] = sbx.isolation.to_dict()
    found["scratch"] = len(os.listdir(sbx._transport._scratch.path))
""",
    )
    assert found["python"] == "42\n"
    assert found["stdout"] == "kept\n"
    assert found["stderr"].count("Permission denied") == 2
    assert secret.read_text() == "secret"
    assert found["tmp"] == "x\n"
    assert found["terminal"] == "5 6\r\n"
    isolation = found["isolation"]
    assert (isolation["root"], isolation["proc"], isolation["ids"]) == ("host", "host", "caller")
    assert (isolation["processes"], isolation["loopback"]) == ("label", "none")
    assert re.fullmatch("[0-9a-f]{16}", isolation["profile"])
    assert isolation["limits"]["processes"] == "watch"


@pytest.mark.spec("C7")
def test_the_label_ends_processes_that_left_the_session(engine: Engine) -> None:
    """The control is the same command with ``none``: there is no label, and it lives on."""
    found = run(
        engine,
        """
daemon = "(setsid sh -c 'sleep 2 & echo $! >> pids; sleep 0.05' &); sleep 0.2; cat pids"
async with session() as sbx:
    other = await sbx.run("sleep 5; echo done", stdout=True)
    result = await sbx.exec(daemon)
    found["sandbox-exec"] = alive(int(result.stdout.split()[0]))
    found["other"] = other.returncode
async with sb.on_device.session(backend="none") as sbx:
    result = await sbx.exec(daemon)
    found["none"] = alive(int(result.stdout.split()[0]))
""",
    )
    assert found == {"sandbox-exec": False, "other": None, "none": True}


NETWORK = """
class Hello(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"hello")
    def log_message(self, *_): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hello)
threading.Thread(target=server.serve_forever, daemon=True).start()
port = server.server_address[1]
fetch = f'''
import os, urllib.request, urllib.error
def tried(opener):
    try:
        return opener.open("http://127.0.0.1:{port}/", timeout=5).read().decode()
    except urllib.error.HTTPError as exc:
        return str(exc.code)
    except OSError as exc:
        return type(exc).__name__
proxy = os.environ.get("HTTP_PROXY", "")
os.environ.pop("no_proxy", None), os.environ.pop("NO_PROXY", None)
handler = urllib.request.ProxyHandler
print(tried(urllib.request.build_opener(handler({{"http": proxy}}))) if proxy else "no proxy",
      tried(urllib.request.build_opener(handler({{}}))),
      tried(urllib.request.build_opener(handler({{"http": "http://" + proxy.rpartition("@")[2]}})))
      if proxy else "no proxy")
'''
async with session() as sbx:
    found["blocked"] = await sbx.run_code(fetch)
    allowed = {"network_mode": "allowlist", "network_allowlist": [f"127.0.0.1:{port}"]}
    found["allowed"] = await sbx.run_code(fetch, **allowed)
    other = {"network_mode": "allowlist", "network_allowlist": ["a.example"]}
    found["off the list"] = await sbx.run_code(fetch, **other)
    found["open"] = await sbx.run_code(fetch, network_mode="open")
"""


@pytest.mark.spec("F3")
def test_the_network_modes(engine: Engine) -> None:
    """By the proxy, past it, and by it without the password of the run."""
    assert run(engine, NETWORK) == {
        "blocked": "no proxy URLError no proxy\n",
        "allowed": "hello URLError 407\n",
        "off the list": "403 URLError 407\n",
        "open": "no proxy hello no proxy\n",
    }


@pytest.mark.spec("C11", "F3")
def test_a_blocked_call_gets_no_profile_of_an_earlier_call(engine: Engine, tmp_path: Path) -> None:
    """Both calls name the same paths, so only the network distinguishes their profiles."""
    found = run(
        engine,
        f"""
import gc, warnings
warnings.simplefilter("error", ResourceWarning)
leaks = []
sys.unraisablehook = lambda one: leaks.append(str(one.exc_value))
paths = {{"read_only_paths": [{str(tmp_path)!r}]}}
async with session(network_mode="allowlist", network_allowlist=["192.0.2.1"]) as sbx:
    for mode in ("allowlist", "blocked"):
        proc = await sbx.run('echo "$HTTP_PROXY"', network_mode=mode, stdout=True, **paths)
        found[mode] = [bool((await proc.communicate())[0].strip()), proc.isolation.loopback]
gc.collect()
found["leaks"] = leaks
""",
    )
    assert found == {"allowlist": [True, "proxies"], "blocked": [False, "none"], "leaks": []}


@pytest.mark.spec("G1")
def test_what_it_cannot_enforce_is_refused(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    found = run(
        engine,
        f"""
found["strict"] = await error_of(session(strict=True).open())
below = {{"host_work_dir": {str(tmp_path)!r}, "read_only_paths": [{str(tmp_path / "kept")!r}]}}
found["below"] = await error_of(session(**below).open())
found["processes"] = None
async with session(resources=sb.Resources(processes=8)) as sbx:
    result = await sbx.exec("for i in 1 2 3 4 5 6 7 8 9 10 11 12; do sleep 9 & done; wait")
    found["processes"] = [result.returncode, result.termination_reason]
""",
    )
    code, message, hint = found["strict"]
    assert code == "backend-unavailable"
    assert "strict=True" in message
    assert "Linux" in hint
    assert "must be read-only" in found["below"][1]
    assert found["processes"][0] == 137


@pytest.mark.spec("G1")
def test_a_nested_sandbox_is_explained(engine: Engine, tmp_path: Path) -> None:
    nested = Engine(engine.launcher, stand_in(tmp_path, nested=True))
    code, message, hint = run(nested, 'found["error"] = await error_of(session().open())')["error"]
    assert code == "backend-unavailable"
    assert "sandbox_apply: Operation not permitted" in message
    assert "do not nest" in hint


def test_a_release_without_an_operation_accepts_the_profile(engine: Engine, tmp_path: Path) -> None:
    older = Engine(engine.launcher, stand_in(tmp_path, without=("mach-cross-domain-lookup",)))
    body = 'async with session() as sbx:\n    found["out"] = (await sbx.exec("echo fine")).stdout'
    assert run(older, body) == {"out": "fine\n"}


def test_a_release_that_refuses_the_profile_is_an_error(engine: Engine, tmp_path: Path) -> None:
    """The control: nothing runs without the profile."""
    broken = Engine(engine.launcher, stand_in(tmp_path, without=("process-fork",)))
    found = run(broken, 'found["error"] = await error_of(session().open())')
    assert "unbound variable: process-fork" in found["error"][1]


def test_doctor_attacks_it(engine: Engine) -> None:
    done = engine.python("-W", "ignore", "-c", "from union.sandbox import doctor; print(doctor())")
    assert done.returncode == 0, done.stderr
    assert "sandbox-exec *   yes" in done.stdout
    # A path of a Unix socket is outside of what the stand-in can refuse on Linux.
    assert "held: network, files, system, descriptors, signals" in done.stdout
    assert "no namespaces, no private root" in done.stdout


TABLE = """
limits = sb.Resources(memory="256Mi")
for name in ("none", "sandbox-exec"):
    async with sb.on_device.session(backend=name, resources=limits) as sbx:
        found[name] = sbx.isolation.to_dict()
"""


def test_the_page_has_a_row_for_each_backend(engine: Engine) -> None:
    page = (ROOT / "docs/reference/portability.md").read_text(encoding="utf-8")
    table = page.partition("<!-- macos: begin -->\n")[2].partition("<!-- macos: end -->")[0]
    rows = ["| backend | isolation |", "|---|---|"]
    for name, one in run(engine, TABLE).items():
        shown = ", ".join(f"{k} {one[k]}" for k in ("root", "proc", "ids", "processes", "loopback"))
        title = f"`{name}`" + (" (stand-in)" if name == "sandbox-exec" else "")
        rows.append(f"| {title} | works: {shown}, memory {one['limits']['memory']} |")
    assert table == "\n".join([*rows, ""])


def names(done: subprocess.CompletedProcess[str]) -> set[str]:
    found = re.findall(r"^FAILED tests/contract/(\S+?)(?:\[| |$)", done.stdout, re.MULTILINE)
    return set(found)


@pytest.mark.elsewhere
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.spec("G1")
def test_the_contract_of_sandbox_exec(engine: Engine) -> None:
    """The part of the suite that depends on the backend; only the listed tests differ."""
    files = [f"tests/contract/test_{name}.py" for name in ("basics", "call_posture", "env_cwd")]
    assert DOCUMENTS not in files
    done = engine.pytest("-n", "2", "--only-way", "sandbox-exec", *files)
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None, done.stdout[-2000:]
    assert int(passed[1]) > 40
    assert names(done) <= set(SANDBOX_EXEC), names(done) - set(SANDBOX_EXEC)


def test_every_listed_difference_names_a_test() -> None:
    contract = Path(__file__).parents[1] / "contract"
    for name in SANDBOX_EXEC:
        file, _, test = name.partition("::")
        assert f"def {test}(" in (contract / file).read_text(encoding="utf-8"), name
    assert os.path.exists(Path(__file__).parents[2] / DOCUMENTS)
