"""Credentials of an environment: code uses the platform's secrets by name, and cannot read them."""

from __future__ import annotations

import copy
from pathlib import Path

import flyte
import pytest
from tests.cluster.local import server_of
from tests.net.https_stub import make_certificate
from tests.network.api_stub import serve_api
from tests.plane.sandboxes import sandbox_plane, settled

from union import sandbox as sb
from union.sandbox.cluster._environment import SandboxResolver

pytestmark = [pytest.mark.timeout(180), pytest.mark.spec("M4")]

VALUE = "sk-proj-platform-0123456789abcdefghijklm"
VARIABLE = "API_CREDENTIAL"
# The name "localhost" is that of the sandbox, so the request goes through the proxy by its name.
# The pod's SSL_CERT_FILE is for its server; a variable of the environment would replace ours.
GET = (
    'SSL_CERT_FILE="$CURL_CA_BUNDLE" '
    "env -u no_proxy -u NO_PROXY python -c 'import sys, urllib.request as u;"
    "print(u.urlopen(sys.argv[1]).read().decode())' https://localhost:{port}/echo"
)


@pytest.fixture(scope="module")
def api(tmp_path_factory):
    place = tmp_path_factory.mktemp("api")
    for directory in (place, *place.parents[:2]):
        directory.chmod(0o755)
    ca, chain = make_certificate(["localhost"], place)
    with serve_api(chain, place) as found, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(ca))
        patch.delenv("SSL_CERT_DIR", raising=False)
        found.ca = ca
        yield found


@pytest.fixture(scope="module")
def environment(api):
    host = f"localhost:{api.port}"
    return sb.SandboxEnvironment(
        name="with-credentials",
        image="stand-in:1",
        env_vars={"SSL_CERT_FILE": str(api.ca)},
        secrets=[flyte.Secret(key="api", as_env_var=VARIABLE)],
        credentials={
            "api": {"variable": VARIABLE, "host": host, "allow": ["GET /echo"]},
            "shared": {"variable": VARIABLE, "host": host, "roles": ["owner", "guest"]},
        },
    )


def network(api, name):
    entry = sb.Http(f"localhost:{api.port}", auth=sb.ServerSecret(name), env="KEY")
    return {"network_mode": "allowlist", "network_allowlist": [entry, "127.0.0.1"]}


async def uses_and_cannot_read(sbx, api):
    api.received.clear()
    result = await sbx.exec(GET.format(port=api.port), check=True, **network(api, "api"))
    assert [(r.path, r.status, r.has_credential) for r in result.requests] == [("/echo", 200, True)]
    assert api.credentials == {f"Bearer {VALUE}"}, "the control: the host received it"
    seen = await sbx.exec("env; cat /proc/*/environ", **network(api, "api"))
    assert "KEY=" in seen.stdout
    for text in (result.stdout, seen.stdout, repr(sbx), str(sbx._fields())):
        assert VALUE not in text
    assert VARIABLE not in seen.stdout
    reference = copy.copy(sbx)
    with pytest.raises(sb.PolicyError) as caught:
        await reference.exec("true", **network(api, "api"))
    assert caught.value.code == "server-secret"
    await reference.exec(GET.format(port=api.port), check=True, **network(api, "shared"))
    await reference.close()


@pytest.mark.threat(190, 191)
async def test_a_process_of_this_machine_reads_the_variable_of_its_owner(
    api, environment, monkeypatch
):
    monkeypatch.setenv(VARIABLE, VALUE)
    async with await sb.session(environment, local=True) as sbx:
        await uses_and_cannot_read(sbx, api)
        own = sb.Http(f"localhost:{api.port}", auth=sb.Bearer(sb.Secret(f"{VALUE}-own")))
        allowed = {"network_mode": "allowlist", "network_allowlist": [own, "127.0.0.1"]}
        await sbx.exec(GET.format(port=api.port), check=True, **allowed)
        assert api.received[-1].headers["authorization"] == f"Bearer {VALUE}-own"
        pid = server_of(sbx)
        for name in ("cmdline", "environ"):
            assert VALUE.encode() not in Path(f"/proc/{pid}/{name}").read_bytes()


async def test_a_variable_that_is_not_set_is_an_error(environment, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(sb.SandboxUsageError) as caught:
        await sb.session(environment, local=True)
    assert caught.value.code == "secret-missing"
    assert VARIABLE in str(caught.value)


@pytest.mark.threat(190, 191)
async def test_a_pod_reads_the_secret_of_the_platform(api, environment):
    with sandbox_plane(secrets={"api": VALUE}) as plane:
        flyte.deploy(environment, version="1", copy_style="none")
        async with await sb.session(environment) as sbx:
            await uses_and_cannot_read(sbx, api)
        settled(plane)
        stored = "".join(str(run.root.details) for run in plane.state.runs.values())
        assert "with-credentials" in stored
        assert VALUE not in stored, "neither the deployment nor the inputs have the value"


def test_commands_do_not_see_the_variable_and_the_pod_gets_the_description(environment):
    assert VARIABLE not in environment.forwarded
    loaded = SandboxResolver().load_task(SandboxResolver().loader_args(environment.server_task))
    assert loaded.parent_env().credentials == environment.credentials


INVALID = {
    "no variable": {"host": "a.test"},
    "a variable without a secret": {"host": "a.test", "variable": "PATH"},
    "no host": {"variable": VARIABLE},
    "a value": {"variable": VARIABLE, "host": "a.test", "valeu": "x"},
    "an unknown auth": {"variable": VARIABLE, "host": "a.test", "auth": "cookie"},
    "an unknown role": {"variable": VARIABLE, "host": "a.test", "roles": ["metrics"]},
}


@pytest.mark.parametrize("case", INVALID)
def test_an_invalid_description_is_refused_before_anything_is_deployed(case):
    with pytest.raises(sb.SandboxUsageError, match="credentials"):
        sb.SandboxEnvironment(
            name=f"invalid-{case.replace(' ', '-')}",
            image="stand-in:1",
            secrets=[flyte.Secret(key="api", as_env_var=VARIABLE)],
            credentials={"api": INVALID[case]},
        )


def test_a_stored_session_has_no_http_entry(api):
    with pytest.raises(sb.PolicyError, match="stored"):
        sb.session(local=True, **network(api, "api"))
