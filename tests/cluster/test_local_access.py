"""Access to the server of a session, and where its tokens are visible."""

from __future__ import annotations

import copy
import os
from pathlib import Path

import pytest
from tests.cluster.local import family, home_of, request, server_of

from union import sandbox as sb
from union.sandbox.cluster._keys import session_name, verifier_of

MODES = {
    "blocked": {},
    "open": {"network_mode": "open"},
    "allowlist": {"network_mode": "allowlist", "network_allowlist": ["127.0.0.0/8", "::1"]},
}


@pytest.mark.spec("I5", "I1")
async def test_without_a_valid_token_only_health_is_available():
    async with await sb.session() as sbx:
        name = session_name(sbx.name)
        assert request(sbx, "GET", "/v1/health", token=None)[0] == 200
        wrong = (None, "", "x" * 43, verifier_of(sbx._handle.keys.owner), sbx.verifier)
        for token in wrong:
            for method, path in (
                ("GET", f"/v1/sessions/{name}"),
                ("POST", f"/v1/sessions/{name}/runs"),
                ("PUT", f"/v1/sessions/{name}"),
                ("DELETE", f"/v1/sessions/{name}"),
                ("POST", "/v1/shutdown"),
                ("GET", "/v1/sessions"),
            ):
                assert request(sbx, method, path, token=token, body={})[0] == 401, (token, path)
        stranger = copy.copy(sbx)
        stranger.access = "x" * 43
        with pytest.raises(sb.SandboxError) as caught:
            await stranger.exec("true")
        assert caught.value.code == "unauthorized"
        await stranger.close()
        assert (await sbx.exec("echo still")).stdout == "still\n"


@pytest.mark.spec("I5")
async def test_a_guest_runs_commands_and_moves_files_and_ends_nothing():
    async with await sb.session() as sbx:
        name = session_name(sbx.name)
        guest = sbx.access
        assert request(sbx, "GET", f"/v1/sessions/{name}", token=guest)[0] == 200
        for method, path in (
            ("POST", "/v1/shutdown"),
            ("DELETE", f"/v1/sessions/{name}"),
            ("PUT", f"/v1/sessions/{name}"),
            ("PUT", f"/v1/sessions/{'ab' * 16}"),
            ("GET", f"/v1/sessions/{'ab' * 16}"),
            ("POST", f"/v1/sessions/{name}/capability"),
            ("GET", "/v1/sessions"),
            ("GET", "/v1/metrics"),
            ("POST", "/v1/run"),
            ("GET", "/v1/console/sessions"),
        ):
            status, payload = request(sbx, method, path, token=guest, body={})
            assert status == 403, (method, path, payload)
        other = copy.copy(sbx)
        await other.put_bytes("a", b"1")
        assert (await sbx.exec("cat a")).stdout == "1"
        # It requests CLOSE like an owner: the server drops the connection and continues.
        link = (await other._live()._connected()) if hasattr(other._live(), "_connected") else None
        assert link is not None
        await link.close(within_s=0.5)
        assert (await sbx.exec("echo still")).stdout == "still\n"
        await other.close()


@pytest.mark.spec("I5")
async def test_even_the_owner_opens_no_second_session():
    async with await sb.session() as sbx:
        owner = sbx._handle.keys.owner
        status, payload = request(sbx, "PUT", f"/v1/sessions/{'ab' * 16}", token=owner, body={})
        assert (status, "one session" in str(payload)) == (403, True)


@pytest.mark.spec("I5", "I8")
async def test_only_this_user_can_reach_the_socket():
    async with await sb.session() as sbx:
        await sbx
        assert os.stat(home_of(sbx)).st_mode & 0o777 == 0o700
        assert os.stat(f"{home_of(sbx)}/s").st_mode & 0o077 == 0


@pytest.mark.spec("I5")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sandbox_mode", ["userns", "bwrap", "landlock"])
async def test_sandboxed_code_cannot_reach_its_own_server(mode, sandbox_mode):
    async with await sb.session(sandbox_mode=sandbox_mode, **MODES[mode]) as sbx:
        await sbx
        path = f"{home_of(sbx)}/s"
        printed = await sbx.run_code(f"""
            import glob, os, socket
            for name in ({path!r}, "\\0" + {path!r}):
                try:
                    s = socket.socket(socket.AF_UNIX)
                    s.connect(name)
                    print("reached", name)
                except OSError as exc:
                    print(type(exc).__name__)
            print(os.path.exists({home_of(sbx)!r}), glob.glob("/var/tmp/sandbox-*"))
            """)
        assert "reached" not in printed
        assert printed.count("Error") == 2, printed
        # landlock does not hide names, only what they lead to.
        exists = sandbox_mode == "landlock"
        assert printed.endswith(f"{exists} []\n"), printed


@pytest.mark.spec("I5", "C5")
async def test_no_token_or_secret_of_the_owner_is_visible(monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "a secret of the owner's")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    async with await sb.session(environment=Environment()) as sbx:
        inside = (
            await sbx.exec("env; cat /proc/*/environ /proc/*/cmdline | tr '\\0' '\\n'")
        ).stdout
        keys = sbx._handle.keys
        seen = inside
        for pid in family(server_of(sbx)):
            for name in ("environ", "cmdline"):
                try:
                    text = Path(f"/proc/{pid}/{name}").read_bytes()
                except OSError:
                    continue
                seen += text.decode("utf-8", "replace")
        seen += sbx._handle._supervisor._tail.decode()
        for secret in (
            keys.owner, keys.guest, verifier_of(keys.owner), "a secret of", "10.0.0.1",
        ):  # fmt: skip
            assert secret not in seen
        assert "GIVEN=to sandboxes" in inside


class Environment:
    """The attributes of a SandboxEnvironment that a session without a pod reads."""

    name = "mine"
    sandbox_mode = "userns"
    resources = None
    env_vars = {"GIVEN": "to sandboxes"}  # noqa: RUF012 - a stand-in

    @property
    def task_env(self) -> Environment:
        return self
