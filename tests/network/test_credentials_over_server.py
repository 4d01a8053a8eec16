"""Credentials over a server: values travel once or live there, and no role reads one back."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

import pytest
from tests.conftest import descendants
from tests.net.https_stub import make_certificate
from tests.network.api_stub import serve_api
from tests.network.process_memory import holders_of
from tests.remote.conftest import Proxy
from tests.servers import ServerProcess

from union import sandbox as sb
from union.sandbox.remote import _http_entries as client_entries

pytestmark = pytest.mark.spec("M4")

HOST = "api.test"
TOKEN = "sk-proj-Tr0ub4dor3staple0123456789abcdef"
STORED = "sk-proj-operator-0123456789abcdefghijklmn"
METRICS = "metrics-token-0123456789abcdef"
GET = """
import sys, urllib.request, urllib.error
for url in sys.argv[1:]:
    try:
        print(urllib.request.urlopen(url).read().decode())
    except urllib.error.HTTPError as exc:
        print(exc.code, exc.read().decode())
"""


@pytest.fixture(scope="module")
def api(tmp_path_factory):
    place = tmp_path_factory.mktemp("api")
    for directory in (place, *place.parents[:2]):
        directory.chmod(0o755)
    ca, chain = make_certificate([HOST], place)
    with serve_api(chain, place) as found:
        found.ca = ca
        yield found


@pytest.fixture(scope="module")
def server(api, tmp_path_factory):
    """A server that has two secrets of its own; one of them is for capabilities too."""
    place = tmp_path_factory.mktemp("secrets")
    file = place / "secrets.toml"
    stored = {"host": f"{HOST}:{api.port}", "value": STORED}
    tables = {
        "api": {**stored, "allow": ["GET /echo", "GET /big"], "max_requests": 2},
        "shared": {**stored, "auth": "header", "name": "x-api-key", "roles": ["capability"]},
    }
    lines = []
    for name, fields in tables.items():
        lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in fields.items())]
    file.write_text("\n".join(lines))
    file.chmod(0o600)
    metrics = place / "metrics"
    metrics.write_text(METRICS)
    metrics.chmod(0o600)
    program = (str(Path(__file__).with_name("named_server.py")), HOST)
    options = ("--secrets", str(file), "--metrics-token-file", str(metrics), "--log-level", "debug")
    before = os.environ.get("SSL_CERT_FILE")
    os.environ["SSL_CERT_FILE"] = str(api.ca)
    try:
        with ServerProcess("--backend", "userns", *options, program=program) as found:
            yield found
    finally:
        if before is None:
            del os.environ["SSL_CERT_FILE"]
        else:
            os.environ["SSL_CERT_FILE"] = before


@pytest.fixture(autouse=True)
def _forget(api):
    api.received.clear()


def connect(server, *, endpoint="", token=None, **options):
    return sb.remote.session(
        endpoint=endpoint or server.endpoint, token=token or server.token, **options
    )


def network(*entries):
    return {"network_mode": "allowlist", "network_allowlist": [*entries, "127.0.0.1"]}


def bound(api, auth=None, **options):
    auth = auth or sb.Bearer(sb.Secret(TOKEN))
    return sb.Http(f"{HOST}:{api.port}", auth=auth, **options)


def url(api, path="/echo"):
    return f"https://{HOST}:{api.port}{path}"


def get(api, *paths):
    return ["python", "-c", GET, *(url(api, path) for path in paths or ("/echo",))]


@pytest.fixture
def values_sent(monkeypatch):
    sent = []
    real = client_entries.encode_secret
    monkeypatch.setattr(
        client_entries, "encode_secret", lambda secret: sent.append(secret) or real(secret)
    )
    return sent


async def test_a_value_travels_once_and_the_records_come_back(server, api, values_sent):
    entry = bound(api, env="API_KEY", allow=["GET /echo"])
    async with connect(server) as session:
        result = await session.exec(get(api, "/echo?q=1", "/refused"), **network(entry))
        again = await session.exec(["sh", "-c", "echo $API_KEY"], **network(entry))
        await session.exec(get(api), **network(entry))
    assert len(values_sent) == 1
    assert api.credentials == {f"Bearer {TOKEN}"}
    assert entry.auth.secret.placeholder == again.stdout.strip()
    assert entry.auth.secret.placeholder in result.stdout, "the echo is scrubbed"
    assert TOKEN not in result.stdout
    allowed, refused = result.requests
    assert (allowed.path, allowed.status, allowed.has_credential) == ("/echo", 200, True)
    assert (refused.path, refused.allowed) == ("/refused", False)
    assert refused.suggestion == "GET /refused"
    assert any(decision.intercepted for decision in result.network)


async def test_entries_of_the_session_and_of_cells(server, api, values_sent):
    entry = bound(api, env="API_KEY")
    code = f"import urllib.request as u; print(u.urlopen({url(api)!r}).read().decode())"
    async with connect(server, **network(entry)) as session:
        result = await session.exec(get(api), check=True)
        assert result.requests[0].has_credential
        with pytest.raises(sb.PolicyError):
            await session.exec("true", **network(sb.Http(f"{HOST}:{api.port}")))
    async with connect(server) as session, session.context() as ctx:
        cell = await ctx.run(code, **network(entry))
        assert cell.requests[0].status == 200
        assert entry.auth.secret.placeholder in cell.stdout
        assert TOKEN not in cell.stdout
        other = await ctx.run(code)
        assert other.error is not None
        assert not other.requests, "the next cell has no network"
    assert api.credentials == {f"Bearer {TOKEN}"}
    assert len(values_sent) == 2, "once for each session"


async def test_records_survive_a_lost_connection(server, api):
    entry = bound(api)
    script = (
        "import urllib.request as u\n"
        f"print(len(u.urlopen({url(api)!r}).read()), flush=True)\n"
        "import os, time\n"
        "while not os.path.exists('go'): time.sleep(0.01)\n"
        f"u.urlopen({url(api, '/big')!r}).read()\n"
    )
    async with Proxy(server) as proxy, connect(server, endpoint=proxy.endpoint) as session:
        proc = await session.run(
            ["python", "-c", script], stdout=sb.PIPE, background=True, **network(entry)
        )
        lines = proc.iter_stdout_lines()
        await anext(lines)
        proxy.cut()
        await session.put_bytes("go", b"")
        assert await proc.wait() == 0
    assert [request.path for request in proc.requests] == ["/echo", "/big"]
    assert all(request.has_credential for request in proc.requests)


async def test_a_dropped_value_is_sent_again(server, api, values_sent):
    entry = bound(api)
    others = [
        sb.Http(f"h{number}.test", auth=sb.Bearer(sb.Secret(f"{TOKEN}-{number}")))
        for number in range(255)
    ]
    async with connect(server) as session, session.context() as ctx:
        await session.exec("true", **network(entry))
        await session.exec("true", **network(*others))
        await session.exec("true", **network(sb.Http("z.test", auth=sb.Bearer(sb.Secret(TOKEN)))))
        before = len(values_sent)
        result = await session.exec(get(api), check=True, **network(entry))
        assert result.requests[0].has_credential
        assert len(values_sent) == before + 1
        await session.exec("true", **network(*others))
        cell = await ctx.run("1 + 1", **network(entry))
        assert cell.results[0].text == "2"


async def test_a_secret_of_the_server_is_used_by_name(server, api, values_sent):
    entry = bound(api, sb.ServerSecret("api"), env="API_KEY", allow=["GET /echo"])
    async with connect(server) as session:
        result = await session.exec(get(api, "/echo", "/big"), **network(entry))
        assert [request.allowed for request in result.requests] == [True, False]
        assert api.credentials == {f"Bearer {STORED}"}
        assert STORED not in result.stdout
        # A second entry does not renew the operator's budget of two requests in a session.
        wider = bound(api, sb.ServerSecret("api"))
        result = await session.exec(get(api, "/big", "/big"), **network(wider))
        assert [request.allowed for request in result.requests] == [True, False]
        assert "max_requests=2" in result.requests[1].reason
    assert not values_sent


BEYOND = {
    "another host": lambda _api: sb.Http("evil.test", auth=sb.ServerSecret("api")),
    "another port": lambda _api: sb.Http(HOST, auth=sb.ServerSecret("api")),
    "another path": lambda api: bound(api, sb.ServerSecret("api"), allow=["GET /**"]),
    "another method": lambda api: bound(api, sb.ServerSecret("api"), allow=["POST /echo"]),
    "without scrubbing": lambda api: bound(api, sb.ServerSecret("api"), scrub=False),
    "websockets": lambda api: bound(api, sb.ServerSecret("api"), websockets=True),
    "an unknown name": lambda api: bound(api, sb.ServerSecret("nothing")),
    "a name of another role": lambda api: bound(api, sb.ServerSecret("shared")),
}


@pytest.mark.threat(190)
@pytest.mark.parametrize("case", BEYOND)
async def test_a_client_cannot_use_a_secret_beyond_the_operators_limits(server, api, case):
    async with connect(server) as session:
        with pytest.raises(sb.PolicyError) as caught:
            await session.exec("touch started", **network(BEYOND[case](api)))
        assert caught.value.code == "server-secret"
        assert (await session.exec("ls")).stdout == ""
    assert not api.received


@pytest.mark.threat(190, 191)
async def test_roles_decide_who_uses_a_name(server, api):
    async with connect(server) as session:
        await session.exec("true")
        status, body = server.request("POST", f"/v1/sessions/{session.id}/capability", b"{}")
        assert status == 200
        capability = json.loads(body)["token"]
        guest = sb.remote.attach(session.id, endpoint=server.endpoint, token=capability)
        async with guest:
            entry = bound(api, sb.ServerSecret("shared"))
            result = await guest.exec(get(api), check=True, **network(entry))
            assert api.received[-1].headers["x-api-key"] == STORED
            assert STORED not in result.stdout
            with pytest.raises(sb.PolicyError) as caught:
                await guest.exec("true", **network(bound(api, sb.ServerSecret("api"))))
            assert caught.value.code == "server-secret"


@pytest.mark.threat(191)
async def test_no_role_reads_a_value_back(server, api):
    """Everything that the server returns or writes, with every token, beside a positive control."""
    entry = bound(api, env="API_KEY", allow=["GET /echo"])
    named = bound(api, sb.ServerSecret("api"), allow=["GET /echo"])
    read = []
    async with connect(server, **network(bound(api))) as session:
        await session.exec(get(api))
        with pytest.raises(sb.PolicyError) as caught:
            await session.exec("true", **network(named))
        read.append(repr(caught.value).encode())
    async with connect(server) as session:
        await session.exec(get(api, "/echo", "/refused"), **network(entry))
        await session.exec(get(api), **network(named))
        capability = json.loads(
            server.request("POST", f"/v1/sessions/{session.id}/capability", b"{}")[1]
        )["token"]
        run = {"cmd": "env; cat /proc/*/environ /proc/*/cmdline", "network_mode": "blocked"}
        for token in (server.token, capability, METRICS, "wrong-token-0123456789", ""):
            headers = {"Authorization": f"Bearer {token}"}
            for method, path, body in (
                ("GET", "sessions", None),
                ("GET", f"sessions/{session.id}", None),
                ("GET", "metrics", None),
                ("GET", "health", None),
                ("GET", "console", None),
                ("GET", f"console/{session.id}", None),
                *(("GET", f"console/{session.id}/runs/{number}", None) for number in (1, 2)),
                ("POST", f"sessions/{session.id}/files/list", {"path": "."}),
                ("GET", f"sessions/{session.id}/file?path=.sandbox-venv/ca-bundle.pem", None),
                ("GET", f"sessions/{session.id}/secrets", None),
                ("GET", "secrets", None),
                ("POST", f"sessions/{session.id}/runs", run),
                ("TRACE", f"sessions/{session.id}", None),
            ):
                text = None if body is None else json.dumps(body).encode()
                more = {} if body is None else {"Content-Type": "application/json"}
                read.append(server.request(method, f"/v1/{path}", text, **headers, **more)[1])
        console = server.get_json(f"/v1/console/{session.id}")
        read.append(json.dumps(console).encode())
    read += [Path(f"/proc/{server.pid}/{name}").read_bytes() for name in ("cmdline", "environ")]
    read.append(server.log.read_bytes())
    everything = b"".join(read)
    for secret in (TOKEN, STORED):
        assert secret.encode() not in everything
    assert [(r["method"], r["path"], r["status"], r["allowed"]) for r in console["requests"]] == [
        ("GET", "/echo", 200, True), ("GET", "/refused", 0, False), ("GET", "/echo", 200, True),
    ]  # fmt: skip
    assert HOST.encode() in everything, "the control: these places do show the requests"
    assert api.credentials == {f"Bearer {TOKEN}", f"Bearer {STORED}"}


@pytest.mark.threat(191)
async def test_helpers_and_core_files_of_a_server_have_no_value(server, api):
    limits = Path(f"/proc/{server.pid}/limits").read_text()
    (core,) = (line for line in limits.splitlines() if line.startswith("Max core file size"))
    assert core.split()[4] == "0", "a crash of the server leaves no core file"
    entry = bound(api)
    async with connect(server) as session:
        command = (
            f"ulimit -c unlimited; {shlex.join(get(api))}; python -c 'import os; os.abort()'; ls"
        )
        result = await session.exec(command, **network(entry))
        assert result.requests[0].has_credential
        for name in await session.list_dir("."):
            if name.kind == "file":
                assert TOKEN.encode() not in await session.get_bytes(name.path)
        proc = await session.run("sleep 30", background=True, **network(entry))
        for secret in (TOKEN, STORED):
            holders, searched = holders_of(secret.encode(), descendants(server.pid))
            assert not holders
            if os.geteuid() == 0:
                assert searched > 2
                assert holders_of(secret.encode(), {server.pid})[0], "the control"
        proc.kill()
        await proc.wait()


RAW = """
import json, os, socket, ssl, sys
host, port = sys.argv[1], int(sys.argv[2])
context = ssl.create_default_context()
for request in json.load(open("requests.json")):
    with socket.create_connection((host, port)) as raw:
        with context.wrap_socket(raw, server_hostname=host) as tls:
            tls.sendall(request.encode("latin-1"))
            try:
                print(tls.recv(12).decode("latin-1", "replace"))
            except OSError as exc:
                print("closed", exc)
"""
HEAD = "HTTP/1.1\r\nHost: {host}\r\n"
BEYOND_RULES = [
    "GET /%65cho/../admin " + HEAD + "\r\n", "GET /echo/..%2fadmin " + HEAD + "\r\n",
    "GET //echo " + HEAD + "\r\n", "GET /echo%2f " + HEAD + "\r\n", "GET /ECHO " + HEAD + "\r\n",
    "GET /%ef%bc%8fecho " + HEAD + "\r\n", "get /echo " + HEAD + "\r\n", "GET /echo\r\n\r\n",
    "GET https://evil.test/echo " + HEAD + "\r\n", "TRACE /echo " + HEAD + "\r\n",
    "GET /echo " + HEAD + "Host: evil.test\r\n\r\n", "POST /echo " + HEAD + "\r\n",
    "GET /echo HTTP/1.1\r\nHost: evil.test\r\n\r\n", "GET /echo " + HEAD + "X: a\r\n b\r\n\r\n",
    "GET /echo " + HEAD + "Content-Length: 4\r\nContent-Length: 5\r\n\r\nabcde",
    "GET /echo " + HEAD + "Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "GET /echo " + HEAD + "Transfer-Encoding: xchunked\r\n\r\n", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "GET /echo HTTP/1.1\nHost: {host}\n\n\r\n\r\n",
]  # fmt: skip


@pytest.mark.threat(181, 190)
async def test_requests_beyond_the_rules_do_not_pass_a_server(server, api):
    place = f"{HOST}:{api.port}"
    allowed = ("GET /echo " + HEAD + "Connection: close\r\n\r\n").format(host=place)
    requests = [text.format(host=place) for text in BEYOND_RULES]
    entry = bound(api, allow=["GET /echo"])
    async with connect(server) as session:
        await session.put_bytes("requests.json", json.dumps([*requests, allowed]).encode())
        argv = ["python", "-c", RAW, HOST, str(api.port)]
        result = await session.exec(argv, check=True, **network(entry))
    *refused, passed = result.stdout.splitlines()
    assert passed == "HTTP/1.1 200", "the control"
    assert len(refused) == len(requests)
    assert not [line for line in refused if " 200" in line]
    assert [(r.method, r.path) for r in api.received] == [("GET", "/echo")]
    assert [r.allowed for r in result.requests].count(True) == 1


@pytest.mark.threat(192)
async def test_a_value_is_not_sent_in_the_clear(api, values_sent):
    """Refused by the client, before anything is sent."""
    elsewhere = {"endpoint": "http://192.0.2.1:8080", "connect_timeout_s": 1}
    with pytest.raises(sb.PolicyError) as caught:
        async with sb.remote.session(**elsewhere, **network(bound(api)), lazy=False):
            pass
    assert caught.value.code == "unencrypted"
    assert "https://" in caught.value.hint
    assert not values_sent


async def test_a_name_of_a_server_means_nothing_on_this_machine(api):
    entry = bound(api, sb.ServerSecret("api"))
    async with sb.on_device.session(backend="userns") as session:
        with pytest.raises(sb.PolicyError) as caught:
            await session.exec("true", **network(entry))
        assert caught.value.code == "server-secret"
        async with session.context() as ctx:
            with pytest.raises(sb.PolicyError):
                await ctx.run("1", **network(entry))
            assert (await ctx.run("1 + 1")).results[0].text == "2"
