"""Credentials that code inside can use and cannot read, with real clients."""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from tests.conftest import ISOLATED, WITHOUT_NAMESPACES, descendants, session_of
from tests.net.https_stub import make_certificate
from tests.network.api_stub import serve_api
from tests.network.process_memory import holders_of
from tests.network.services import PACKAGE, make_index, make_repository

from union import sandbox as sb

pytestmark = pytest.mark.spec("M1", "M2", "M3")

HOST = "api.test"
TOKEN = "sk-proj-Tr0ub4dor3staple0123456789abcdef"


@pytest.fixture(scope="module")
def _api(tmp_path_factory):
    place = tmp_path_factory.mktemp("api")
    for directory in (place, *place.parents[:2]):
        directory.chmod(0o755)
    make_index(place / "web")
    make_repository(place / "web" / "repo.git", place / "checkout")
    ca, chain = make_certificate([HOST, "other.test"], place)
    with serve_api(chain, place / "web") as api:
        yield api, ca


@pytest.fixture
def api(_api, resolver, monkeypatch):
    found, ca = _api
    for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "NODE_EXTRA_CA_CERTS"):
        monkeypatch.setenv(name, str(ca))
    monkeypatch.delenv("SSL_CERT_DIR", raising=False)
    resolver.table |= {HOST: ["127.0.0.1"], "other.test": ["127.0.0.1"]}
    found.received.clear()
    return found


PACKAGES = Path(__file__).parents[2] / ".cache" / "clients"
"""Clients whose requirements contradict those of the other tests."""
MISSING = "not installed: `make test` installs it (pip install --target .cache/clients ...)"


@pytest.fixture
async def sbx(api):
    paths = [str(PACKAGES)] if PACKAGES.is_dir() else []
    env = {"PYTHONPATH": ":".join(paths)}
    async with session_of("userns", read_only_paths=paths, env=env) as session:
        yield session


def is_installed(package):
    return (PACKAGES / package).is_dir() or importlib.util.find_spec(package) is not None


def entry(api, **options):
    options.setdefault("auth", sb.Bearer(sb.Secret(TOKEN)))
    options.setdefault("env", "OPENAI_API_KEY")
    return sb.Http(f"{HOST}:{api.port}", **options)


def network(*entries):
    return {"network_mode": "allowlist", "network_allowlist": [*entries, "127.0.0.1"]}


CLIENTS = {
    "urllib": "import urllib.request; print(urllib.request.urlopen(base + '/echo').read())",
    "requests": "import requests; print(requests.get(base + '/echo', timeout=20).text)",
    "httpx": "import httpx; print(httpx.get(base + '/echo').text)",
    "aiohttp": (
        "import aiohttp, asyncio\n"
        "async def main():\n"
        "    async with aiohttp.ClientSession() as s, s.get(base + '/echo') as r:\n"
        "        print(await r.text())\n"
        "asyncio.run(main())"
    ),
    "openai": (
        "import openai\n"
        "c = openai.OpenAI(base_url=base + '/v1')\n"
        "m = [{'role': 'user', 'content': 'ping'}]\n"
        "print(c.chat.completions.create(model='m', messages=m).choices[0].message.content)"
    ),
    "anthropic": (
        "import anthropic, os\n"
        "c = anthropic.Anthropic(base_url=base, api_key=os.environ['OPENAI_API_KEY'])\n"
        "m = [{'role': 'user', 'content': 'ping'}]\n"
        "print(c.messages.create(model='m', max_tokens=1, messages=m).content[0].text)"
    ),
}


@pytest.mark.parametrize("client", CLIENTS)
async def test_python_clients_work_without_changes(sbx, api, client):
    if not is_installed(client):
        pytest.skip(f"{client} is {MISSING}")
    code = f"base = 'https://{HOST}:{api.port}'\n{CLIENTS[client]}"
    key = sb.Secret(TOKEN)
    auth = sb.Header("x-api-key", key) if client == "anthropic" else sb.Bearer(key)
    out = await sbx.run_code(code, **network(entry(api, auth=auth)))
    assert key.placeholder in out or "pong" in out
    assert TOKEN not in out
    (request,) = api.received
    sent = request.headers["x-api-key" if client == "anthropic" else "authorization"]
    assert sent.removeprefix("Bearer ") == TOKEN


@pytest.mark.parametrize("backend", [*sorted({*ISOLATED} - {"userns"}), *WITHOUT_NAMESPACES])
async def test_other_backends_serve_the_same_entries(api, backend):
    """Once through the proxy variables, once without them."""
    code = f"""
        import urllib.request
        for handlers in ([], [urllib.request.ProxyHandler({{}})]):
            opener = urllib.request.build_opener(*handlers)
            print(opener.open("https://{HOST}:{api.port}/echo").status)
    """
    async with session_of(backend) as sbx:
        assert await sbx.run_code(code, **network(entry(api))) == "200\n200\n"
    assert api.credentials == {f"Bearer {TOKEN}"}


SHELL = {
    "curl": "curl -sS {base}/echo",
    "curl without proxy variables": "env -u HTTPS_PROXY -u https_proxy curl -sS {base}/echo",
    "git": "git clone -q {base}/repo.git c && cat c/file",
    "uv": f"uv pip install -q --no-cache --default-index {{base}}/simple {PACKAGE}"
    f" && python -c 'import {PACKAGE}; print({PACKAGE}.answer)'",
    "node": "node -e 'fetch(\"{base}/echo\").then(r => r.text()).then(console.log)'",
    "java": "java Fetch.java {base}/echo",
    "go": "./fetch {base}/echo",
}
NEEDS = {"java": "default-jdk-headless", "node": "nodejs", "go": "golang-go"}
GO = """
package main
import ("io"; "net/http"; "os")
func main() {
    response, err := http.Get(os.Args[1])
    if err != nil { panic(err) }
    io.Copy(os.Stdout, response.Body)
}
"""
JAVA = """
import java.net.URL;
public class Fetch {
    public static void main(String[] args) throws Exception {
        System.out.write(new URL(args[0]).openStream().readAllBytes());
        System.out.flush();
    }
}
"""


def go_program():
    """Return a client in Go, built once for its source: a build takes longer than all the tests."""
    place = Path(__file__).parents[2] / ".cache" / "go"
    program = place / f"fetch-{hashlib.sha256(GO.encode()).hexdigest()[:16]}"
    if not program.exists():
        try:
            place.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            pytest.skip(f"a program in Go is built in {place}, which needs a writable one: {error}")
        with tempfile.TemporaryDirectory(dir=place) as scratch:
            source, built = Path(scratch, "fetch.go"), Path(scratch, "fetch")
            source.write_text(GO)
            env = {**os.environ, "GOCACHE": str(place / "cache"), "CGO_ENABLED": "0"}
            subprocess.run(["go", "build", "-o", built, source], check=True, env=env, cwd=scratch)
            built.rename(program)
    return program.read_bytes()


@pytest.mark.parametrize("client", SHELL)
async def test_programs_work_without_changes(sbx, api, client):
    tool = client.split()[0]
    needed = {"java": "javac", "node": "node"}.get(tool, tool)
    if tool != "uv" and shutil.which(needed) is None:
        pytest.skip(f"{needed} is not installed: apt-get install {NEEDS.get(tool, tool)}")
    await sbx.put_bytes("Fetch.java", JAVA.encode())
    if tool == "go":
        await sbx.put_bytes("fetch", go_program(), mode=0o755)
    command = SHELL[client].format(base=f"https://{HOST}:{api.port}")
    result = await sbx.exec(command, timeout_s=100, **network(entry(api)))
    assert result.ok, result.stderr
    assert api.credentials == {f"Bearer {TOKEN}"}
    assert TOKEN not in result.stdout + result.stderr
    assert result.requests
    assert all(request.status in {200, 404} for request in result.requests)


async def test_boto3_signs_again_with_the_real_key(sbx, api, monkeypatch):
    if not is_installed("boto3"):
        pytest.skip(f"boto3 is {MISSING}")
    # Last, so that everything else is imported from where it always is.
    monkeypatch.setattr(sys, "path", [*sys.path, str(PACKAGES)])
    from botocore.auth import S3SigV4Auth
    from botocore.awsrequest import AWSRequest
    from botocore.credentials import Credentials

    code = f"""
        import boto3, botocore.config
        s3 = boto3.client(
            "s3", endpoint_url="https://{HOST}:{api.port}", region_name="eu-central-1",
            aws_access_key_id="AKIAPLACEHOLDER", aws_secret_access_key="placeholder",
            config=botocore.config.Config(
                s3={{"addressing_style": "path"}}, request_checksum_calculation="when_required",
            ),
        )
        s3.put_object(Bucket="bucket", Key="a key+plus", Body=b"content")
        print(s3.get_object(Bucket="bucket", Key="a key+plus")["Body"].read())
    """
    auth = sb.SigV4("AKIAREAL", sb.Secret(TOKEN))
    out = await sbx.run_code(code, **network(entry(api, auth=auth, env=None)))
    assert "b'content'" in out
    assert [request.method for request in api.received] == ["PUT", "GET"]
    for request in api.received:
        given = request.headers["authorization"]
        assert "Credential=AKIAREAL/" in given
        signed = given.partition("SignedHeaders=")[2].partition(",")[0].split(";")
        again = AWSRequest(
            method=request.method,
            url=f"https://{HOST}:{api.port}{request.path}",
            headers={name: request.headers[name] for name in signed},
            data=request.body,
        )
        again.context["timestamp"] = request.headers["x-amz-date"]
        signer = S3SigV4Auth(Credentials("AKIAREAL", TOKEN), "s3", "eu-central-1")
        canonical = signer.canonical_request(again)
        assert signer.signature(signer.string_to_sign(again, canonical), again) in given


async def test_refusals_are_data_on_results_and_errors(sbx, api):
    limits = network(entry(api, allow=["GET /echo"]))
    base = f"https://{HOST}:{api.port}"
    result = await sbx.exec(f"curl -sS -X POST {base}/admin", **limits)
    assert "rule that would allow it: POST /admin" in result.stdout
    (request,) = result.requests
    assert (request.allowed, request.suggestion) == (False, "POST /admin")
    assert result.network[0].intercepted
    with pytest.raises(sb.SandboxCommandError) as caught:
        await sbx.exec(f"curl -sSf -X POST {base}/admin", check=True, **limits)
    assert caught.value.requests[0].suggestion == "POST /admin"
    assert "'POST /admin'" in caught.value.hint
    with pytest.raises(sb.SandboxCommandError) as caught:
        await sbx.run_code("import socket; socket.create_connection(('no.test', 1))", **limits)
    assert not caught.value.network[0].allowed
    assert "no.test" in caught.value.hint


@pytest.mark.parametrize(
    "code",
    [
        "import urllib.request; urllib.request.urlopen('https://example.com')",
        "import socket; socket.create_connection(('192.0.2.1', 80))",
    ],
)
async def test_a_blocked_network_is_explained(sbx, code):
    with pytest.raises(sb.SandboxCommandError) as caught:
        await sbx.run_code(code)
    assert "network_mode='allowlist'" in caught.value.hint
    with pytest.raises(sb.SandboxCommandError) as caught:
        await sbx.run_code("raise SystemExit(3)")
    assert not caught.value.hint


@pytest.mark.threat(185)
async def test_the_secret_is_nowhere_inside(sbx, api):
    """Search the environment, every readable file of /proc, the work dir and /run."""
    code = f"""
        import os, urllib.request
        urllib.request.urlopen('https://{HOST}:{api.port}/echo').read()
        needle = {TOKEN[:12]!r} + {TOKEN[12:]!r}
        needle, found, searched = needle.encode(), [], 0
        me = f'/proc/{{os.getpid()}}'
        for top in ('/proc', os.getcwd(), '/run', '/tmp', '/etc'):
            for where, dirs, files in os.walk(top):
                if where.startswith(me):
                    dirs.clear()
                    files = ['environ', 'cmdline'] if where == me else []
                for name in files:
                    path = os.path.join(where, name)
                    if name in ('kmsg', 'kcore', 'pagemap', 'mem', 'clear_refs'):
                        continue
                    try:
                        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
                        data = os.read(fd, 1 << 20)
                        os.close(fd)
                    except OSError:
                        continue
                    searched += 1
                    if needle in data:
                        found.append(path)
        print(searched > 100, [f for f in found if not f.endswith('main.py')])
        print(os.environ['OPENAI_API_KEY'].startswith('sk-proj-'))
    """
    out = await sbx.run_code(code, **network(entry(api)))
    assert out == "True []\nTrue\n"


@pytest.mark.threat(185)
async def test_the_secret_is_in_no_file_and_no_process_of_the_host(sbx, api):
    proc = await sbx.run(
        f"curl -sS https://{HOST}:{api.port}/echo && sleep 30",
        background=True,
        **network(entry(api)),
    )
    async with asyncio.timeout(40):
        while not proc.requests:
            await asyncio.sleep(0.02)
    # The launcher, prepared sandboxes, waiting Pythons, and the command itself.
    holders, searched = holders_of(TOKEN.encode(), descendants(os.getpid()))
    assert not holders
    if os.geteuid() == 0:
        assert searched > 2
        assert holders_of(TOKEN.encode(), {os.getpid()})[0], "the control: this process has it"
    own = str(os.getpid())
    for name in os.listdir("/proc"):
        if name.isdigit() and name != own:
            for file in ("environ", "cmdline"):
                try:
                    assert TOKEN.encode() not in Path("/proc", name, file).read_bytes(), name
                except OSError:
                    continue
    for where, _, files in os.walk(sbx.work_dir):
        for name in files:
            path = Path(where, name)
            if path.is_file() and not path.is_symlink():
                data = path.read_bytes()
                assert TOKEN.encode() not in data
                assert b"PRIVATE KEY" not in data
    proc.kill()
    await proc.wait()


@pytest.mark.threat(185)
async def test_the_secret_cannot_be_passed_by_mistake(sbx, api):
    limits = network(entry(api))
    with pytest.raises(sb.PolicyError, match="placeholder"):
        await sbx.exec("true", env={"KEY": f"Bearer {TOKEN}"}, **limits)
    with pytest.raises(sb.PolicyError) as caught:
        await sbx.exec(f"curl -H 'x: {TOKEN}' https://{HOST}", **limits)
    assert TOKEN not in str(caught.value)
    with pytest.raises(TypeError, match="pickled"):
        pickle.dumps(limits["network_allowlist"])


async def test_only_bound_hosts_are_intercepted(sbx, api):
    names = [entry(api), "other.test"]
    code = f"""
        import urllib.request
        for host in ('{HOST}', 'other.test'):
            print(urllib.request.urlopen(f'https://{{host}}:{api.port}/echo').status)
    """
    proc = await sbx.run(code, script_type="python", **network(*names))
    assert (await proc.communicate())[0] == b"200\n200\n"
    found = {d.host: d.intercepted for d in proc.network if d.door != "dns"}
    assert found == {HOST: True, "other.test": False}
    assert api.credentials == {f"Bearer {TOKEN}", ""}


async def test_a_redirect_takes_no_credential_along(sbx, api):
    result = await sbx.exec(f"curl -sSL https://{HOST}:{api.port}/redirect", **network(entry(api)))
    assert not result.ok
    assert [d.host for d in result.network if not d.allowed] == ["elsewhere.test"]


async def test_a_call_stays_within_its_session(api):
    wide = entry(api, allow=["GET /echo", "GET /v1/**"], max_requests=5)
    async with session_of("userns", **network(wide)) as sbx:
        narrow = entry(api, auth=wide.auth, allow=["GET /v1/models"], max_requests=1)
        for allowed in (wide, narrow):
            assert (await sbx.exec("true", **network(allowed))).ok
        for refused in (
            f"{HOST}:{api.port}",
            entry(api, auth=wide.auth, allow=["GET /v1/**"]),
            entry(api, auth=wide.auth, allow=["POST /v1/x"], max_requests=1),
            entry(api, allow=["GET /echo"], max_requests=1),
            entry(api, auth=None, env=None, allow=["GET /echo"], max_requests=1),
        ):
            with pytest.raises(sb.PolicyError):
                await sbx.exec("true", **network(refused))


async def test_changed_certificates_are_written_again(sbx, api):
    limits = network(entry(api))
    assert (await sbx.exec('echo > "$SSL_CERT_FILE"', **limits)).ok
    assert (await sbx.exec(f"curl -sS https://{HOST}:{api.port}/echo", **limits)).ok


async def test_cells_have_their_own_entries(api):
    fetch = f"""
import os, urllib.request
print(urllib.request.urlopen('https://{HOST}:{api.port}/echo').status, os.environ['OPENAI_API_KEY'])
"""
    async with session_of("userns") as sbx, sbx.context() as ctx:
        key = sb.Secret(TOKEN)
        result = await ctx.run(fetch, **network(entry(api, auth=sb.Bearer(key))))
        assert result.stdout == f"200 {key.placeholder}\n"
        assert [request.path for request in result.requests] == ["/echo"]
        blocked = await ctx.run(fetch)
        assert blocked.error is not None
        assert not blocked.requests
        by_name = await ctx.run(
            "import os; print('OPENAI_API_KEY' in os.environ)", **network("other.test")
        )
        assert by_name.stdout == "False\n"
        again = await ctx.run(fetch, **network(entry(api, max_requests=0)))
        assert again.error is not None
        assert "max_requests" in again.requests[0].reason
