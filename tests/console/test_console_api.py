"""The console API: its content, its access checks, and no effect on the client of a run."""

from __future__ import annotations

import http.client
import json
import socket
import time
from typing import TYPE_CHECKING

import pytest
from tests.conftest import eventually
from tests.console.conftest import Console
from tests.servers import ServerProcess

if TYPE_CHECKING:
    from collections.abc import Callable


MIB = 1024 * 1024
NAME = "ab" * 16
ROUTES = [
    ("GET", "/v1/console"),
    ("GET", f"/v1/console/{NAME}"),
    ("GET", f"/v1/console/{NAME}/runs/1"),
    ("DELETE", f"/v1/console/{NAME}/runs/1"),
]


def text_of(lines: list[dict], stream: str) -> str:
    return "".join(line["text"] for line in lines if line.get("stream") == stream)


def silent_observer(server: ServerProcess, path: str) -> socket.socket:
    """Request the output of a run and never read the response."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(server.address)
    head = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {server.token}\r\n\r\n"
    sock.sendall(head.encode())
    return sock


def becomes_steady(look: Callable[[], int]) -> bool:
    """Return whether a number stops growing."""
    before = look()
    time.sleep(0.3)
    return before == look() > 0


@pytest.mark.spec("I1")
def test_sessions_and_runs_are_listed(console: Console):
    name = console.open(network_mode="blocked", timeout_s=500)
    run = console.run(name, "echo out; echo err >&2; exit 3")
    assert run.end["exited"]["returncode"] == 3
    overview = console.server.get_json("/v1/console")
    (summary,) = (s for s in overview["sessions"] if s["session"] == name)
    assert summary["backend"] == "userns"
    assert summary["work_dir"] == str(console.server.work_dir)
    assert summary["runs"] == 1
    assert summary["running"] == 0
    assert 0 <= overview["now"] - summary["opened_at"] < 60
    detail = console.detail(name)
    (record,) = detail["recorded"]
    assert record["command"] == "echo out; echo err >&2; exit 3"
    assert record["end"] == run.end
    assert (record["stdout_bytes"], record["stderr_bytes"]) == (4, 4)
    assert record["started_at"] <= record["ended_at"] <= detail["now"]
    assert detail["isolation"]["backend"] == "userns"
    assert detail["timeout_s"] == 500
    lines = console.follow(name, record["run"])
    assert text_of(lines, "stdout") == "out\n"
    assert text_of(lines, "stderr") == "err\n"
    assert lines[-1] == {"end": run.end}


def test_decisions_are_listed(console: Console):
    name = console.open(network_mode="allowlist", network_allowlist=["allowed.example"])
    console.run(name, "getent hosts a.example; getent hosts b.example; true").join()
    detail = console.detail(name)
    refused = [d for d in detail["decisions"] if not d["allowed"]]
    assert {d["host"] for d in refused} == {"a.example", "b.example"}
    assert {(d["run"], d["door"]) for d in refused} == {(1, "dns")}
    assert len({d["number"] for d in detail["decisions"]}) == len(detail["decisions"])
    assert detail["recorded"][0]["refused"] == len(refused)
    assert detail["network_allowlist"] == ["allowed.example"]


def test_environment_and_stdin_are_not_listed(console: Console):
    name = console.open(env={"A": "secret-of-the-session"})
    body = {"cmd": "cat >f", "env": {"B": "secret-of-the-run"}, "stdin": "secret-of-stdin"}
    headers = {"Content-Type": "application/json"}
    path = f"/v1/sessions/{name}/runs"
    assert console.server.request("POST", path, json.dumps(body).encode(), **headers)[0] == 200
    payload = json.dumps([console.detail(name), console.server.get_json("/v1/console")])
    assert "cat >f" in payload
    assert "secret-of" not in payload


@pytest.mark.spec("I1")
@pytest.mark.parametrize("method, path", ROUTES)
def test_requests_without_the_token_are_refused(console: Console, method: str, path: str):
    name = console.open()
    console.run(name, "true").join()
    wanted = path.replace(NAME, name)
    _, body = console.server.request("POST", f"/v1/sessions/{name}/capability", b"{}")
    smaller = json.loads(body)["token"]
    for token, expected in (("", 401), ("Bearer wrong", 401), (f"Bearer {smaller}", 403)):
        status, body = console.server.request(method, wanted, Authorization=token)
        assert status == expected
        assert name not in body.decode()
    for origin in ("https://attacker.example", "null"):
        assert console.server.request(method, wanted, Origin=origin)[0] == 403
    assert console.server.request(method, wanted)[0] == 200  # the control


def test_unknown_paths(console: Console):
    name = console.open()
    for method, path in (
        ("GET", f"/v1/console/{NAME}"),
        ("GET", f"/v1/console/{name}/runs/1"),
        ("GET", f"/v1/console/{name}/runs/x"),
        ("GET", f"/v1/console/{name}/runs/%C2%B2"),
        ("GET", f"/v1/console/{name}/runs/{'9' * 5000}"),
        ("DELETE", f"/v1/console/{name}/runs/7"),
        ("POST", f"/v1/console/{name}"),
        ("GET", f"/v1/console/{name}/other/1"),
    ):
        status, body = console.server.request(method, path)
        assert status == 404, (method, path, body)


def test_observing_does_not_renew_the_lease(console: Console):
    """An observed session ends when its client is gone; one in use does not."""
    watched, used = console.open(), console.open()

    def watched_is_gone() -> bool:
        assert console.server.request("GET", f"/v1/sessions/{used}")[0] == 200
        return console.server.request("GET", f"/v1/console/{watched}")[0] == 404

    lease = console.detail(watched)["lease_s"]
    assert 0 < lease <= 2
    assert eventually(watched_is_gone, within_s=10)
    assert console.is_open(used)


def test_an_observer_that_does_not_read_slows_no_client(console: Console):
    name = console.open()
    begin = "while [ ! -e go ]; do sleep 0.02; done; "
    run = console.run(name, begin + "seq 1000000; touch done")
    observers = [silent_observer(console.server, f"/v1/console/{name}/runs/1") for _ in range(4)]
    before = console.server.metric("sandbox_max_resident_bytes")
    assert console.server.request("PUT", f"/v1/sessions/{name}/file?path=go", b"")[0] == 200
    try:
        assert run.end["exited"]["returncode"] == 0
        assert run.stdout == "".join(f"{n}\n" for n in range(1, 1000001))
        grown = console.server.metric("sandbox_max_resident_bytes") - before
        assert grown < 48 * MIB
    finally:
        for sock in observers:
            sock.close()


def test_an_observer_does_not_acknowledge_output(console: Console):
    """Back-pressure of a client that does not read is unchanged by an observer."""
    name = console.open()
    head = (
        f"POST /v1/sessions/{name}/runs HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\n"
        f"Authorization: Bearer {console.server.token}\r\n\r\nyes"
    )
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(console.server.address)
        client.sendall(head.encode())
        assert eventually(lambda: bool(console.runs(name)), within_s=10)
        with socket.create_connection(console.server.address, timeout=10) as observer:
            path = f"/v1/console/{name}/runs/1"
            auth = f"Authorization: Bearer {console.server.token}"
            observer.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{auth}\r\n\r\n".encode())
            assert b"200 OK" in observer.recv(65536)
            assert eventually(
                lambda: becomes_steady(lambda: console.runs(name)[0]["stdout_bytes"]), within_s=15
            )
        assert console.runs(name)[0]["stdout_bytes"] < 16 * MIB
        assert console.runs(name)[0]["end"] is None


def test_skipped_output_is_counted(console: Console):
    name = console.open()
    run = console.run(name, "seq 100000")
    total = len(run.stdout)
    lines = console.follow(name, 1)
    skipped = sum(line.get("skipped", 0) for line in lines)
    seen = text_of(lines, "stdout")
    assert skipped + len(seen) == total
    assert seen == run.stdout[-len(seen) :]
    assert 32 * 1024 < len(seen) <= 80 * 1024


def test_split_characters_are_joined(console: Console):
    name = console.open()
    word = "printf '\\303'; sleep 0.3; printf '\\251'; printf '\\377\\n'"
    console.run(name, word).join()
    assert text_of(console.follow(name, 1), "stdout") == "é\ufffd\n"


def test_the_number_of_observers_is_limited(console: Console):
    name = console.open()
    run = console.run(name, "sleep 30")
    path = f"/v1/console/{name}/runs/1"
    observers = [silent_observer(console.server, path) for _ in range(32)]
    try:
        for sock in observers:
            assert b"200 OK" in sock.recv(4096)
        status, body = console.server.request("GET", path)
        assert status == 503
        assert json.loads(body)["error"]["code"] == "busy"
    finally:
        for sock in observers:
            sock.close()
    # New observers are accepted once the server has noticed that the others are gone.
    assert eventually(lambda: _is_let_in(console.server, path), within_s=10)
    assert console.server.request("DELETE", path)[0] == 200
    assert run.end["exited"]["reason"] == "operator"


def _is_let_in(server: ServerProcess, path: str) -> bool:
    with silent_observer(server, path) as sock:
        return b"200 OK" in sock.recv(4096)


def test_an_operator_ends_a_run_and_the_session_continues(console: Console):
    name = console.open()
    run = console.run(name, "echo before; setsid sleep 600 & wait")
    assert eventually(lambda: console.runs(name)[0]["stdout_bytes"] == 7, within_s=10)
    path = f"/v1/console/{name}/runs/1"
    assert console.server.request("DELETE", path) == (200, b'{"ended":true}\n')
    assert run.end["exited"]["reason"] == "operator"
    assert run.end["exited"]["returncode"] > 128
    assert run.stdout == "before\n"
    # A second request succeeds, because the run has ended.
    assert console.server.request("DELETE", path) == (200, b'{"ended":true}\n')
    assert console.run(name, "echo again").stdout == "again\n"


def test_an_observer_receives_the_end_of_the_session(console: Console):
    name = console.open()
    run = console.run(name, "sleep 600")
    with socket.create_connection(console.server.address, timeout=10) as observer:
        auth = f"Authorization: Bearer {console.server.token}"
        path = f"/v1/console/{name}/runs/1"
        observer.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{auth}\r\n\r\n".encode())
        assert console.server.request("DELETE", f"/v1/sessions/{name}")[0] == 200
        received = b""
        while b'"end"' not in received:
            piece = observer.recv(65536)
            assert piece, received
            received += piece
    run.join()
    assert not console.is_open(name)


def test_refused_runs_stay_in_the_list():
    arguments = ("--backend", "userns", "--network-mode", "blocked", "--drain", "0.1")
    with ServerProcess(*arguments) as server:
        console = Console(server)
        _run_beyond_the_ceiling(console)
        console.clear()


def _run_beyond_the_ceiling(console: Console) -> None:
    name = console.open()
    path = f"/v1/sessions/{name}/runs"
    refused = json.dumps({"cmd": "true", "network_mode": "open"}).encode()
    headers = {"Content-Type": "application/json"}
    console.run(name, "echo first").join()
    for _ in range(5):
        status, body = console.server.request("POST", path, refused, **headers)
        assert status == 200
        assert b"refused" in body
    runs = console.runs(name)
    assert [run["run"] for run in runs] == [1, 2, 3, 4, 5, 6]
    assert all("refused" in run["end"] for run in runs[1:])


@pytest.mark.parametrize(
    "name", ["", "index.html", "main.js", "plain.js", "console.css", "icon.svg"]
)
def test_the_files_have_a_content_security_policy(console: Console, name: str):
    connection = http.client.HTTPConnection(*console.server.address, timeout=20)
    connection.request("GET", f"/console/{name}")
    response = connection.getresponse()
    body = response.read()
    connection.close()
    assert response.status == 200
    policy = response.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; ")
    assert "unsafe" not in policy
    assert "*" not in policy
    assert "frame-ancestors 'none'" in policy
    assert response.headers["X-Content-Type-Options"] == "nosniff"
    assert response.headers["Referrer-Policy"] == "no-referrer"
    assert b"http://" not in body.replace(b"http://www.w3.org/2000/svg", b"")
    assert b"https://" not in body
    assert b"innerHTML" not in body


def test_only_the_files_are_served_without_a_token(console: Console):
    for path in (
        "/console/_app.py",
        "/console/../_app.py",
        "/console/%2e%2e/_app.py",
        "/console/..%2f_app.py",
        "/console//etc/passwd",
        "/console/console/main.js",
        "/consoles",
    ):
        assert console.server.request("GET", path, Authorization="")[0] == 401, path
        assert console.server.request("GET", path)[0] == 404, path
    for method in ("POST", "PUT", "DELETE"):
        assert console.server.request(method, "/console/", b"", Authorization="")[0] == 401
    assert console.server.request("GET", "/console/", Host="attacker.example")[0] == 403
    assert console.server.request("GET", "/console/", Origin="http://attacker.example")[0] == 403
    assert console.server.request("GET", "/console/", **{"Sec-Fetch-Site": "same-site"})[0] == 403
