"""Runs and files over plain HTTP: lines of JSON, resume with an idempotency key."""

from __future__ import annotations

import base64
import concurrent.futures
import json
import os
import socket
import time
from typing import TYPE_CHECKING, Any

import pytest
from tests.conftest import eventually
from tests.remote.conftest import is_idle

from union.sandbox._wire.frames import MAX_CHUNK, WINDOW

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.servers import ServerProcess

MIB = 1024 * 1024


@pytest.fixture
def path(quick: ServerProcess) -> Iterator[str]:
    """Open a session; return its path."""
    found = f"/v1/sessions/{os.urandom(16).hex()}"
    assert quick.request("PUT", found, b"{}")[0] == 200
    yield found
    quick.request("DELETE", found)


def parse_lines(body: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in body.splitlines()]


def stream(lines: list[dict[str, Any]], name: str) -> bytes:
    found = b""
    for line in lines:
        if line.get("stream") == name:
            assert line["offset"] == len(found)
            data = line["text"].encode() if "text" in line else base64.b64decode(line["base64"])
            found += data
    return found


@pytest.mark.spec("I1")
def test_a_command_and_its_end(quick: ServerProcess, path: str):
    status, body = quick.request("POST", f"{path}/runs", b"echo hi; printf '\\377' >&2; exit 3")
    lines = parse_lines(body)
    assert status == 200
    assert lines[0]["started"]["pid"] > 0
    assert stream(lines, "stdout") == b"hi\n"
    assert stream(lines, "stderr") == b"\xff"
    assert lines[-1]["exited"]["returncode"] == 3
    assert lines[-1]["exited"]["reason"] == ""


@pytest.mark.spec("I1")
def test_all_arguments_of_a_run(quick: ServerProcess, path: str):
    arguments = {
        "cmd": "import os, sys; print(os.environ['A'], os.getcwd(), sys.stdin.read())",
        "script_type": "python",
        "env": {"A": "b"},
        "cwd": ".",
        "stdin": "typed",
        "timeout_s": 30,
        "stderr": False,
    }
    body = json.dumps(arguments).encode()
    headers = {"Content-Type": "application/json"}
    _, answer = quick.request("POST", f"{path}/runs", body, **headers)
    assert stream(parse_lines(answer), "stdout").decode() == f"b {quick.work_dir} typed\n"
    for wrong in ({"cmd": "x", "shell": True}, {"cmd": 5}, {"cmd": "x", "stdin": 5}, {}):
        status, answer = quick.request(
            "POST", f"{path}/runs", json.dumps(wrong).encode(), **headers
        )
        assert (status, b"error" in answer) == (400, True)


@pytest.mark.spec("I1")
def test_one_command_in_a_session_of_its_own(quick: ServerProcess):
    status, body = quick.request("POST", "/v1/run", b"echo x > f; ls")
    assert status == 200
    assert stream(parse_lines(body), "stdout") == b"f\n"
    assert eventually(lambda: is_idle(quick))
    wrong = json.dumps({"cmd": "true", "session": {"network_mode": "strange"}}).encode()
    status, body = quick.request("POST", "/v1/run", wrong, **{"Content-Type": "application/json"})
    assert (status, json.loads(body)["error"]["argument"]) == (400, "network_mode")


@pytest.mark.spec("C9")
def test_a_call_wider_than_its_session_is_refused(quick: ServerProcess):
    path = f"/v1/sessions/{os.urandom(16).hex()}"
    assert quick.request("PUT", path, b'{"network_mode": "blocked"}')[0] == 200
    wrong = json.dumps({"cmd": "true", "network_mode": "open"}).encode()
    headers = {"Content-Type": "application/json"}
    status, body = quick.request("POST", f"{path}/runs", wrong, **headers)
    assert (status, json.loads(body)["error"]["code"]) == (403, "policy")
    quick.request("DELETE", path)


@pytest.mark.spec("I2")
def test_the_same_key_does_not_run_twice(quick: ServerProcess, path: str):
    headers = {"Idempotency-Key": "once"}
    command = b"echo ran >> log; echo out; echo err >&2; exit 4"
    _, first = quick.request("POST", f"{path}/runs", command, **headers)
    _, second = quick.request("POST", f"{path}/runs", command, **headers)
    assert parse_lines(first)[-1] == parse_lines(second)[-1]
    assert stream(parse_lines(second), "stdout") == b"out\n"
    _, rest = quick.request("POST", f"{path}/runs?stdout=2&stderr=4", command, **headers)
    assert [line["text"] for line in parse_lines(rest) if "stream" in line] == ["t\n"]
    _, body = quick.request("GET", f"{path}/file?path=log")
    assert body == b"ran\n"
    _, other = quick.request("POST", f"{path}/runs", command, **{"Idempotency-Key": "twice"})
    assert parse_lines(other)[-1]["exited"]["returncode"] == 4
    assert quick.request("GET", f"{path}/file?path=log")[1] == b"ran\nran\n"


@pytest.mark.spec("I2")
def test_output_that_is_no_longer_kept_is_an_error(quick: ServerProcess, path: str):
    headers = {"Idempotency-Key": "large"}
    command = b"head -c 3000000 /dev/zero"
    _, first = quick.request("POST", f"{path}/runs", command, **headers)
    assert len(stream(parse_lines(first), "stdout")) == 3_000_000
    status, body = quick.request("POST", f"{path}/runs", command, **headers)
    assert status == 400, (status, body[:500])
    assert json.loads(body)["error"]["code"] == "run-lost"
    _, rest = quick.request("POST", f"{path}/runs?stdout=2999999", command, **headers)
    assert [line["text"] for line in parse_lines(rest) if "stream" in line] == ["\0"]
    status, body = quick.request("POST", f"{path}/runs?stdout=5", b"x", **{"Idempotency-Key": "n"})
    assert (status, json.loads(body)["error"]["code"]) == (400, "run-lost")


@pytest.mark.threat(125)
@pytest.mark.spec("I2")
def test_a_disconnect_ends_the_command(quick: ServerProcess, path: str):
    with socket.create_connection(quick.address, timeout=10) as sock:
        sock.sendall(
            f"POST {path}/runs HTTP/1.1\r\nHost: localhost\r\n"
            f"Authorization: Bearer {quick.token}\r\nContent-Length: 20\r\n\r\n"
            "echo up; sleep 60   ".encode()
        )
        seen = b""
        while b"up" not in seen:
            seen += sock.recv(4096)
    assert eventually(lambda: quick.metric("sandbox_runs") == 0)


@pytest.mark.spec("I3")
def test_a_slow_reader_applies_back_pressure(quick: ServerProcess, path: str):
    with socket.create_connection(quick.address, timeout=10) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        command = b"head -c 50000000 /dev/zero; echo > done"
        sock.sendall(
            f"POST {path}/runs HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {quick.token}"
            f"\r\nContent-Length: {len(command)}\r\n\r\n".encode()
            + command
        )
        time.sleep(0.5)
        assert quick.metric("sandbox_buffer_bytes") < WINDOW + MAX_CHUNK + 1024
        assert quick.request("GET", f"{path}/file?path=done")[0] == 404


def test_files(quick: ServerProcess, path: str):
    data = os.urandom(3 * MIB)
    assert json.loads(quick.request("PUT", f"{path}/file?path=d/f&mode=600", data)[1]) == {
        "size": len(data)
    }
    assert quick.request("GET", f"{path}/file?path=d/f") == (200, data)
    assert quick.request("PUT", f"{path}/file?path=d/f&overwrite=0", b"")[0] == 409
    assert quick.request("GET", f"{path}/file?path=d/f&max_bytes=10")[0] == 413
    assert quick.request("GET", f"{path}/file?path=none")[0] == 404
    assert quick.request("GET", f"{path}/file?path=../x")[0] in {400, 403}
    assert quick.request("PUT", f"{path}/file?path=x&mode=4755", b"")[0] == 400
    assert quick.request("PUT", f"{path}/file", b"")[0] == 400
    raw = f"{path}/file?path=raw%FF%FE"
    assert quick.request("PUT", raw, b"bytes")[0] == 200
    assert quick.request("GET", raw) == (200, b"bytes")
    listed = json.loads(quick.request("POST", f"{path}/files/list", b'{"path": "d"}')[1])
    assert [(e["path"], e["size"], e["mode"]) for e in listed["entries"]] == [
        ("d/f", len(data), 0o600)
    ]


@pytest.mark.spec("I3")
def test_many_concurrent_requests(quick: ServerProcess, path: str):
    def one(number: int) -> bytes:
        _, body = quick.request("POST", f"{path}/runs", b"echo %d" % number)
        return stream(parse_lines(body), "stdout")

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert list(pool.map(one, range(40))) == [b"%d\n" % n for n in range(40)]
