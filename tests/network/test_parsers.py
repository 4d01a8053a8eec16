"""Differences between parsers: the checked destination must be the connected one.

Every request here reaches `allowed.test` or no server; `other.test` listens on the same address and
must receive none.
"""

# ruff: noqa: E501 - each request is on one line
from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from tests.conftest import SOON_S
from tests.network.inside import run_inside

from union.sandbox._net import http_proxy

if TYPE_CHECKING:
    from tests.network.conftest import Resolver
    from tests.network.services import Services

    from union import sandbox as sb

pytestmark = pytest.mark.spec("F3", "F4", "F8")

A, B = "allowed.test:{port}", "other.test:{port}"
OK = {
    "unchanged": f"GET http://{A}/hello HTTP/1.1\r\nHost: {A}\r\n\r\n",
    "upper case": "GET HTTP://ALLOWED.Test:{port}/hello HTTP/1.1\r\nhOST: allowed.TEST:{port}\r\n\r\n",
    "trailing dot": "GET http://allowed.test.:{port}/hello HTTP/1.1\r\nHost: allowed.test:{port}\r\n\r\n",
    "IDNA": "GET http://xn--bcher-kva.test:{port}/hello HTTP/1.1\r\nHost: xn--bcher-kva.test:{port}\r\n\r\n",
    "http/1.0 without Host": f"GET http://{A}/hello HTTP/1.0\r\n\r\n",
}
REFUSED = {
    "another name": f"GET http://{B}/ HTTP/1.1\r\nHost: {B}\r\n\r\n",
    "Host of another": f"GET http://{A}/ HTTP/1.1\r\nHost: {B}\r\n\r\n",
    "Host of an allowed one": f"GET http://{B}/ HTTP/1.1\r\nHost: {A}\r\n\r\n",
    "two Hosts": f"GET http://{A}/ HTTP/1.1\r\nHost: {A}\r\nHost: {B}\r\n\r\n",
    "no Host": f"GET http://{A}/ HTTP/1.1\r\n\r\n",
    "Host with another port": f"GET http://{A}/ HTTP/1.1\r\nHost: allowed.test:1\r\n\r\n",
    "folded Host": f"GET http://{A}/ HTTP/1.1\r\nHost: {A}\r\n {B}\r\n\r\n",
    "space before colon": f"GET http://{A}/ HTTP/1.1\r\nHost : {B}\r\n\r\n",
    "origin form": f"GET / HTTP/1.1\r\nHost: {B}\r\n\r\n",
    "asterisk form": f"OPTIONS * HTTP/1.1\r\nHost: {A}\r\n\r\n",
    "userinfo before another": f"GET http://{A}@{B}/ HTTP/1.1\r\nHost: {B}\r\n\r\n",
    "userinfo": f"GET http://user:secret@{B}/ HTTP/1.1\r\nHost: {B}\r\n\r\n",
    "fragment": f"GET http://{B}#@{A}/ HTTP/1.1\r\nHost: {A}\r\n\r\n",
    "query": f"GET http://{B}?@{A}/ HTTP/1.1\r\nHost: {A}\r\n\r\n",
    "backslash": f"GET http://{B}\\@{A}/ HTTP/1.1\r\nHost: {A}\r\n\r\n",
    "semicolon": "GET http://other.test;allowed.test:{port}/ HTTP/1.1\r\nHost: allowed.test:{port}\r\n\r\n",
    "comma": "GET http://other.test,allowed.test:{port}/ HTTP/1.1\r\nHost: allowed.test:{port}\r\n\r\n",
    "percent": "GET http://other%2etest:{port}/ HTTP/1.1\r\nHost: other%2etest:{port}\r\n\r\n",
    "NUL": "GET http://other.test\0.allowed.test:{port}/ HTTP/1.1\r\nHost: allowed.test:{port}\r\n\r\n",
    "percent NUL": "CONNECT other.test%00allowed.test:{port} HTTP/1.1\r\n\r\n",
    "space": "CONNECT other.test allowed.test:{port} HTTP/1.1\r\n\r\n",
    "tab": "CONNECT other.test\t.allowed.test:{port} HTTP/1.1\r\n\r\n",
    "bare CR": f"GET http://{A}/\rHost:{B} HTTP/1.1\r\nHost: {A}\r\n\r\n",
    "bare LF": f"GET http://{A}/ HTTP/1.1\nHost: {B}\r\nHost: {A}\r\n\r\n",
    "https in absolute form": f"GET https://{A}/ HTTP/1.1\r\nHost: {A}\r\n\r\n",
    "ftp": f"GET ftp://{A}/ HTTP/1.1\r\nHost: {A}\r\n\r\n",
    "no authority": f"GET http:///hello HTTP/1.1\r\nHost: {A}\r\n\r\n",
    "empty host": "GET http://:{port}/ HTTP/1.1\r\nHost: :{port}\r\n\r\n",
    "similar name": "CONNECT allowed.test.other.test:{port} HTTP/1.1\r\n\r\n",
    "prefix": "CONNECT xallowed.test:{port} HTTP/1.1\r\n\r\n",
    "two dots": "CONNECT allowed..test:{port} HTTP/1.1\r\n\r\n",
    "brackets": "CONNECT [allowed.test]:{port} HTTP/1.1\r\n\r\n",
    "zone": "CONNECT [fe80::1%25allowed.test]:{port} HTTP/1.1\r\n\r\n",
    "CONNECT with a Host of another": f"CONNECT {A} HTTP/1.1\r\nHost: {B}\r\n\r\n",
    "CONNECT to another with our Host": f"CONNECT {B} HTTP/1.1\r\nHost: {A}\r\n\r\n",
    "CONNECT without port": "CONNECT allowed.test HTTP/1.1\r\n\r\n",
    "port 0": "CONNECT allowed.test:0 HTTP/1.1\r\n\r\n",
    "port too high": "CONNECT allowed.test:{port}000 HTTP/1.1\r\n\r\n",
    "signed port": "CONNECT allowed.test:+{port} HTTP/1.1\r\n\r\n",
    "two lengths": f"POST http://{A}/ HTTP/1.1\r\nHost: {A}\r\nContent-Length: 1\r\nContent-Length: 60\r\n\r\nx",
    "length and chunks": f"POST http://{A}/ HTTP/1.1\r\nHost: {A}\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "odd coding": f"POST http://{A}/ HTTP/1.1\r\nHost: {A}\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "twice chunked": f"POST http://{A}/ HTTP/1.1\r\nHost: {A}\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "negative length": f"POST http://{A}/ HTTP/1.1\r\nHost: {A}\r\nContent-Length: -1\r\n\r\n",
    "listed length": f"POST http://{A}/ HTTP/1.1\r\nHost: {A}\r\nContent-Length: 1, 2\r\n\r\nx",
    "http/2 preface": "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "http/0.9": f"GET http://{A}/\r\n\r\n",
    "garbage": "\x16\x03\x01\x02\r\n\r\n",
}


def _allow(served: Services) -> list[str]:
    return ["allowed.test", "bücher.test", f"127.0.0.1:{served.http.port}"]


def _others(served: Services) -> list[str]:
    return [line for line in served.http.requests if "other" in line]


_EACH = """
for name, request in given["requests"].items():
    out[name] = attempt(status, request)
"""


@pytest.mark.threat(82, 83, 84, 85, 86, 87, 90, 94, 95)
@pytest.mark.parametrize("requests", [OK, REFUSED], ids=["served", "refused"])
async def test_the_proxy_and_the_policy_parse_the_same_destination(
    net: sb.Session, served: Services, resolver: Resolver, requests: dict[str, str]
) -> None:
    port = str(served.http.port)
    given = {"requests": {name: text.replace("{port}", port) for name, text in requests.items()}}
    seen = await run_inside(net, _EACH, allow=_allow(served), given=given)
    expected = {200} if requests is OK else {400, 403}
    wrong = {name: found for name, (found, took) in seen.out.items() if found not in expected}
    assert wrong == {}
    assert max(took for _, took in seen.out.values()) < SOON_S
    assert _others(served) == []
    assert len(served.http.requests) == (len(OK) if requests is OK else 0)
    assert "other.test" not in resolver.queries
    assert len(seen.refusals) == (0 if requests is OK else len(REFUSED))


@pytest.mark.threat(83, 95)
async def test_each_request_of_a_connection_is_checked(net: sb.Session, served: Services) -> None:
    """Pipelined, after a body, inside a chunked body."""
    code = """
    a, b = (f"{name}:{given['port']}" for name in ("allowed.test", "other.test"))
    good = f"GET http://{a}/hello HTTP/1.1\\r\\nHost: {a}\\r\\n\\r\\n"
    bad = f"GET http://{b}/hello HTTP/1.1\\r\\nHost: {b}\\r\\n\\r\\n"
    length = f"POST http://{a}/hello HTTP/1.1\\r\\nHost: {a}\\r\\nContent-Length: {len(bad)}\\r\\n\\r\\n"
    def statuses(text):
        return [int(part.split()[0]) for part in send_and_read(HTTP, text.encode()).split("HTTP/1.1 ")[1:]]
    out["pipelined"] = attempt(statuses, good + bad + good)
    out["two good"] = attempt(statuses, good + good)
    out["after a body"] = attempt(statuses, length + bad + bad)
    """
    seen = await run_inside(net, code, allow=_allow(served), given={"port": served.http.port})
    assert seen.out["pipelined"][0] == [200, 403]
    assert seen.out["two good"][0] == [200, 200]
    # The first `bad` is the body of a POST: the allowed server receives and returns it as data.
    assert seen.out["after a body"][0][0] == 200
    assert seen.out["after a body"][0][-1] == 403
    assert _others(served) == []
    assert [d.host for d in seen.refusals] == ["other.test"] * 2


@pytest.mark.threat(94)
@pytest.mark.parametrize("frontend", ["http", "tcp"])
@pytest.mark.parametrize(
    "server_name, wanted",
    [("allowed.test", "ok"), ("other.test", "refused"), ("bücher.test", "ok"),
     ("allowed.test.other.test", "refused")],
)  # fmt: skip
async def test_the_tls_server_name_must_be_allowed_too(
    net: sb.Session, served: Services, frontend: str, server_name: str, wanted: str
) -> None:
    """An allowed CDN does not give access to the hosts behind it."""
    code = """
    def handshake():
        raw = tunnel("allowed.test", given["port"]) if given["frontend"] == "http" else socket.create_connection(("allowed.test", given["port"]))
        context = ssl.create_default_context()
        context.check_hostname = False
        with context.wrap_socket(raw, server_hostname=given["name"]):
            return "ok"
    out["handshake"] = attempt(handshake)
    """
    given = {"port": served.https.port, "name": server_name, "frontend": frontend}
    allow = ["allowed.test", "bücher.test", "127.0.0.1"]
    seen = await run_inside(net, code, allow=allow, given=given)
    found, took = seen.out["handshake"]
    assert took < SOON_S
    if wanted == "ok":
        assert found == "ok"
        assert not seen.refusals
    else:
        assert found in {"ECONNRESET", "SSLError", "SSLEOFError", "SSLZeroReturnError"}
        assert [d.door for d in seen.refusals] == [frontend]
        assert "server name" in seen.refusals[0].reason


@pytest.mark.threat(84, 97)
async def test_socks_names_are_parsed_completely(
    net: sb.Session, served: Services, resolver: Resolver
) -> None:
    """NUL and control characters in names; commands other than CONNECT."""
    code = """
    for text in given["names"]:
        out[text] = attempt(socks, text.encode("latin-1"), given["port"])
    out["bind"] = attempt(socks, "allowed.test", given["port"], 2)
    out["udp"] = attempt(socks, "allowed.test", given["port"], 3)
    out["good"] = attempt(socks, "allowed.test", given["port"])
    """
    names = ["other.test\0.allowed.test", "allowed.test\0.other.test", "other.test\r\n.allowed.test",
             "other.test .allowed.test", "other.test%00allowed.test", "allowed.test@other.test",
             "other.test#allowed.test", "allowed.test:80", "\xff\xfe", "", "." , "a" * 255,
             "127.0.0.1.", "0x7f.1", "127.0.0.1:1"]  # fmt: skip
    seen = await run_inside(
        net, code, allow=["allowed.test"], given={"names": names, "port": served.echo.port}
    )
    assert seen.out.pop("bind")[0] == 7
    assert seen.out.pop("udp")[0] == 7
    # The name is allowed but resolves to loopback, which is refused.
    assert seen.out.pop("good")[0] == 2
    assert {found for found, _ in seen.out.values()} == {2}, seen.out
    assert resolver.queries == ["allowed.test"]
    assert served.echo.connections == 0


@pytest.mark.threat(100)
async def test_oversized_heads_and_garbage_are_refused_and_disconnected(
    net: sb.Session, served: Services
) -> None:
    """The next request is served."""
    code = """
    good = f"GET http://allowed.test:{given['port']}/hello HTTP/1.1\\r\\nHost: allowed.test:{given['port']}\\r\\n\\r\\n"
    out["large header"] = attempt(status, "GET http://allowed.test/ HTTP/1.1\\r\\nX: " + "x" * 70000 + "\\r\\n\\r\\n")
    out["many headers"] = attempt(status, "GET http://allowed.test/ HTTP/1.1\\r\\n" + "X: y\\r\\n" * 12000 + "\\r\\n")
    out["long line"] = attempt(status, "GET http://allowed.test/" + "x" * 70000 + " HTTP/1.1\\r\\n\\r\\n")
    out["zeroes"] = attempt(send_and_read, HTTP, bytes(100_000))
    out["socks garbage"] = attempt(send_and_read, SOCKS, bytes(100_000))
    out["good"] = attempt(status, good)
    """
    seen = await run_inside(net, code, allow=_allow(served), given={"port": served.http.port})
    assert [seen.out[name][0] for name in ("large header", "many headers", "long line")] == [
        431, 431, 431]  # fmt: skip
    assert seen.out["good"][0] == 200
    assert max(took for _, took in seen.out.values()) < SOON_S


@pytest.mark.threat(100)
async def test_slow_clients_do_not_delay_others(
    net: sb.Session, served: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow request times out; 150 half-open connections do not delay others."""
    monkeypatch.setattr(http_proxy, "_HEAD_TIMEOUT_S", 0.5)
    code = """
    good = f"GET http://allowed.test:{given['port']}/hello HTTP/1.1\\r\\nHost: allowed.test:{given['port']}\\r\\n\\r\\n"
    held = [socket.create_connection(HTTP if n % 2 else SOCKS) for n in range(150)]
    for s in held[1::2]:
        s.sendall(b"GET http://allo")
    out["good"] = attempt(status, good)
    def trickle():
        with socket.create_connection(HTTP, timeout=10) as s:
            try:
                for letter in good * 3:
                    s.sendall(letter.encode())
                    time.sleep(0.02)
            except (BrokenPipeError, ConnectionResetError):
                pass
            return s.recv(100).split()[1].decode()
    out["trickle"] = attempt(trickle)
    held[1].settimeout(5)
    out["held"] = attempt(lambda: held[1].recv(100).split()[1].decode())
    """
    begun = time.monotonic()
    seen = await run_inside(net, code, allow=_allow(served), given={"port": served.http.port})
    assert seen.out["good"][0] == 200
    assert seen.out["good"][1] < 2
    assert seen.out["trickle"][0] in {"408", "ECONNRESET"}
    assert seen.out["held"][0] == "408"
    assert time.monotonic() - begun < SOON_S
