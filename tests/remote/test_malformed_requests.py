"""Malformed requests and repeated requests: responses and logs."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import threading
import time
from typing import TYPE_CHECKING

import pytest
from tests.conftest import eventually
from tests.servers import ServerProcess

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess("--log-level", "debug", "--header-timeout", "1") as found:
        yield found


def answer_to(server: ServerProcess, request: bytes, *, within_s: float = 10) -> bytes:
    """Return the response to these bytes; empty if the server waits for more."""
    answer = b""
    with (
        socket.create_connection(server.address, timeout=within_s) as sock,
        contextlib.suppress(ConnectionError, TimeoutError),
    ):
        sock.sendall(request)
        while not _is_whole(answer) and (data := sock.recv(65536)):
            answer += data
    return answer


def _is_whole(answer: bytes) -> bool:
    head, end, body = answer.partition(b"\r\n\r\n")
    if not end:
        return False
    sizes = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    return not sizes or len(body) >= int(sizes[0].partition(b":")[2])


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


# The token.

ODD_TOKENS = {
    "Windows line end": "Authorization: Bearer {}\r\r\n",
    "NUL": "Authorization: Bearer {}\0\r\n",
    "bare CR": "Authorization: Bearer {}\rX\r\n",
    "folded": "Authorization: Bearer\r\n {}\r\n",
    "space before the colon": "Authorization : Bearer {}\r\n",
    "too long": "Authorization: Bearer {}" + " " * 9000 + "\r\n",
    "two hosts": "Host: x\r\nAuthorization: Bearer {}\r\n",
    "no scheme": "Authorization: {}\r\n",
    "another scheme": "Authorization: Basic {}\r\n",
    "twice": "Authorization: Bearer {0}\r\nAuthorization: Bearer {0}\r\n",
    "no separator": "Authorization: Bearer{}\r\n",
    "in front": "Authorization: Bearer x{}\r\n",
    "as a host": "Host: {}:{}@[\r\n",
    "as a method": "{}\r\n",
    "as a protocol": "Upgrade: websocket\r\nSec-WebSocket-Protocol: {}\r\n",
    "as a length": "Content-Length: {}\r\n",
    "as an encoding": "Transfer-Encoding: {}\r\n",
    "as an origin": "Origin: {}\r\n",
}


@pytest.mark.threat(157)
@pytest.mark.parametrize("case", ODD_TOKENS)
def test_a_token_in_a_malformed_header_is_not_repeated(server: ServerProcess, case: str):
    token = str(server.token)
    header = ODD_TOKENS[case].format(token, token)
    host = "" if header.startswith("Host: " + token) else "Host: 127.0.0.1\r\n"
    for path in ("/v1/sessions", f"/v1/sessions?token={token}", f"/v1/{token}"):
        answer = answer_to(server, f"GET {path} HTTP/1.1\r\n{host}{header}\r\n".encode())
        assert status_of(answer) in {400, 401, 403}, answer
        assert token.encode() not in answer
    fine = f"GET /v1/sessions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {token}\r\n\r\n"
    assert status_of(answer_to(server, fine.encode())) == 200, "positive control: valid token"
    log = server.log.read_text()
    assert "listening" in log
    assert token not in log
    assert "Traceback" not in log


@pytest.mark.threat(157)
@pytest.mark.parametrize(
    "value", ["", "Bearer", "Bearer ", "Basic x", "Bearer wrong", "Bearer \xff"]
)
def test_an_invalid_token_gets_a_fixed_response(server: ServerProcess, value: str):
    request = f"GET /v1/sessions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: {value}\r\n\r\n"
    answer = answer_to(server, request.encode("latin-1"))
    assert status_of(answer) == 401
    payload = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert (payload["message"], payload["code"]) == ("invalid token", "unauthorized")


# Headers.

HOSTS = [
    "[", "[::1", "[zz]", "a]b", "http://[", "\u2100.example", "x@127.0.0.1", "127.0.0.1%00",
    "[fe80::1%25eth0]", "[::ffff:1.2.3.4", "a:b:c", "localhost:", "localhost:x", "\xff", "a b", "/",
]  # fmt: skip


@pytest.mark.threat(166)
@pytest.mark.parametrize("host", HOSTS)
def test_a_malformed_host_is_refused(server: ServerProcess, host: str):
    for path in ("/v1/sessions", "/v1/health", "/console/"):
        request = f"GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()
        answer = answer_to(server, request)
        assert status_of(answer) == 400, answer
    assert "Traceback" not in server.log.read_text()
    fine = b"GET /v1/health HTTP/1.1\r\nHost: [::1]:80\r\n\r\n"
    assert status_of(answer_to(server, fine)) == 200, "positive control"


NAMES = [
    "Host", "Origin", "Authorization", "Content-Length", "Transfer-Encoding", "Content-Type",
    "Connection", "Upgrade", "Expect", "Range", "Cookie", "Content-Encoding", "Accept-Encoding",
    "Idempotency-Key", "Sec-WebSocket-Key", "Sec-WebSocket-Version", "Sec-WebSocket-Protocol",
    "Sec-WebSocket-Extensions", "Sec-Fetch-Site", "If-None-Match", "Keep-Alive", "Via",
]  # fmt: skip
PIECES = [
    "[", "]", "%", "%zz", "%00", "\xff", "\t", ";", ",", "=", '"', "'", ":", "@", "//", "?", "#",
    "\\", "..", "0", "-1", "9" * 30, "1e9", "a" * 300, "\u00e9", "{}", "bytes=0-", "gzip",
    "chunked",
    "websocket", "Upgrade", "keep-alive", "100-continue", "application/json",
    "text/plain; charset=x", "Bearer ", "cap1.", "cap1.W10=.x", "13", "union-sandbox.1", " ",
]  # fmt: skip
TARGETS = [
    "/v1/health", "/v1/sessions", "/v1/sessions/{}", "/v1/sessions/{}/connect", "/console/",
    "/v1/sessions/{}/runs", "/v1/sessions/{}/file?path=a", "/v1/sessions/{}/files/list", "/v1/run",
    "/v1/sessions/{}/capability", "/v1/console/{}", "/v1/console/{}/runs/1", "*", "/%", "/%ff",
    "//", "http://[/", "http://x/v1/health", "/v1/sessions/{}/runs?stdout=%ff&a&b&c&d&e&f&g&h&i&j",
    "/v1/sessions/{}/file?" + "a&" * 40, "/v1/sessions/{}/file?path=a&max_bytes=" + "9" * 5000,
]  # fmt: skip
METHODS = ["GET", "PUT", "POST", "DELETE", "HEAD", "OPTIONS", "TRACE", "CONNECT", "BREW"]


@pytest.mark.threat(166)
@pytest.mark.timeout(180)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("has_token", [True, False], ids=["token", "no token"])
def test_malformed_headers_never_cause_a_traceback(
    server: ServerProcess, seed: int, *, has_token: bool
):
    chance = random.Random(seed)
    name = os.urandom(16).hex()
    assert server.request("PUT", f"/v1/sessions/{name}", b"{}")[0] == 200
    answered = 0
    for _ in range(100):
        lines = ["Host: 127.0.0.1"] if chance.random() < 0.9 else []
        if has_token:
            lines.append(f"Authorization: Bearer {server.token}")
        if chance.random() < 0.3:
            lines += ["Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13"]
        for _ in range(chance.randrange(1, 4)):
            value = "".join(chance.choice(PIECES) for _ in range(chance.randrange(3)))
            lines.append(f"{chance.choice(NAMES)}: {value}")
        target = chance.choice(TARGETS).replace("{}", name)
        head = f"{chance.choice(METHODS)} {target} HTTP/1.1\r\n" + "\r\n".join(lines)
        request = head.encode("utf-8" if chance.random() < 0.5 else "latin-1", "replace")
        answer = answer_to(server, request + b"\r\n\r\n{}", within_s=0.3)
        answered += bool(answer)
        assert b" 500 " not in answer.partition(b"\r\n")[0], head
    assert answered > 50, "positive control: most get a response"
    server.request("DELETE", f"/v1/sessions/{name}")
    assert "Traceback" not in server.log.read_text()


# Idempotency keys.


@pytest.fixture
def session(server: ServerProcess) -> Iterator[tuple[str, str]]:
    name = os.urandom(16).hex()
    assert server.request("PUT", f"/v1/sessions/{name}", b"{}")[0] == 200
    _, body = server.request("POST", f"/v1/sessions/{name}/capability", b"{}")
    yield f"/v1/sessions/{name}/runs", json.loads(body)["token"]
    server.request("DELETE", f"/v1/sessions/{name}")


UUID = b"cat /proc/sys/kernel/random/uuid"


@pytest.mark.threat(165)
def test_an_idempotency_key_belongs_to_one_caller(server: ServerProcess, session: tuple[str, str]):
    path, capability = session
    key = {"Idempotency-Key": "job-1"}
    guest = {**key, "Authorization": f"Bearer {capability}"}
    owners = server.request("POST", path, UUID, **key)
    assert server.request("POST", path, UUID, **key) == owners, "positive control: no second run"
    guests = server.request("POST", path, UUID, **guest)
    assert guests[0] == 200
    assert _texts(guests[1]) != _texts(owners[1])
    assert server.request("POST", path, UUID, **guest) == guests
    # Another session, or another capability of this session, cannot reach the run.
    name = path.split("/")[3]
    _, body = server.request("POST", f"/v1/sessions/{name}/capability", b'{"expires_s": 60}')
    other = {**key, "Authorization": f"Bearer {json.loads(body)['token']}"}
    assert _texts(server.request("POST", path, UUID, **other)[1]) not in (
        _texts(owners[1]),
        _texts(guests[1]),
    )


def _texts(body: bytes) -> list[str]:
    return [
        payload["text"] for line in body.splitlines() if "text" in (payload := json.loads(line))
    ]


@pytest.mark.threat(165)
def test_an_idempotency_key_belongs_to_one_body(server: ServerProcess, session: tuple[str, str]):
    path, _ = session
    key = {"Idempotency-Key": "job-2"}
    first = server.request("POST", path, UUID, **key)
    for body, more in (
        (b"echo another", {}),
        (UUID + b" ", {}),
        (b"", {}),
        (UUID, {"Content-Type": "application/json"}),
    ):
        status, answer = server.request("POST", path, body, **key, **more)
        if more:
            assert status == 400, "the body is not JSON"
        else:
            assert (status, json.loads(answer)["error"]["code"]) == (422, "key-reused")
            assert _texts(first[1])[0].strip().encode() not in answer
    assert server.request("POST", path, UUID, **key) == first, "positive control"


@pytest.mark.threat(165)
def test_a_repeated_request_takes_the_run_over(server: ServerProcess, session: tuple[str, str]):
    path, _ = session
    command = b"echo begun; sleep 1.5; echo over"
    answers: list[tuple[int, bytes]] = []

    def ask() -> None:
        answers.append(server.request("POST", path, command, **{"Idempotency-Key": "job-3"}))

    first = threading.Thread(target=ask)
    first.start()
    assert eventually(lambda: server.metric("sandbox_runs") == 1)
    time.sleep(0.2)  # the first one has its first line, or not: both are fine
    ask()
    first.join(20)
    assert not first.is_alive()
    ends = {json.dumps(json.loads(body.splitlines()[-1])) for _, body in answers}
    assert len(ends) == 2
    assert sum('"superseded"' in end for end in ends) == 1
    assert sum('"exited"' in end for end in ends) == 1


@pytest.mark.threat(165)
@pytest.mark.parametrize("key", ["", "x" * 300])
def test_an_invalid_key_is_refused(server: ServerProcess, session: tuple[str, str], key: str):
    path, _ = session
    status, _ = server.request("POST", path, b"true", **{"Idempotency-Key": key})
    assert status == 400


@pytest.mark.threat(165)
def test_a_run_without_a_session_accepts_no_idempotency_key(server: ServerProcess):
    """It would run a second time."""
    status, body = server.request("POST", "/v1/run", UUID, **{"Idempotency-Key": "k"})
    assert (status, json.loads(body)["error"]["argument"]) == (400, "Idempotency-Key")
    assert server.request("POST", "/v1/run", UUID)[0] == 200, "positive control"


@pytest.mark.threat(165)
@pytest.mark.parametrize(
    "query", ["stdout=-1", "stderr=-5", "stdout=1_0", "stdout=1e3", "stdout=%00"]
)
def test_an_invalid_offset_is_refused(server: ServerProcess, session: tuple[str, str], query: str):
    path, _ = session
    key = {"Idempotency-Key": "job-4"}
    assert server.request("POST", path, b"echo x", **key)[0] == 200
    assert server.request("POST", f"{path}?{query}", b"echo x", **key)[0] == 400
