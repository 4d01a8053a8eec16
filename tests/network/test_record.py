"""Every connection is recorded as a decision, and every refusal is logged once."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import pytest
from tests.network.inside import run_inside

if TYPE_CHECKING:
    from tests.network.conftest import Resolver
    from tests.network.services import Services

    from union import sandbox as sb

pytestmark = pytest.mark.spec("D2", "F8")

LOGGER = "union.sandbox.network"


async def test_an_allowed_connection_is_recorded_with_its_bytes_and_time(
    net: sb.Session, served: Services
) -> None:
    code = """
    with socket.create_connection(("allowed.test", given["port"])) as s:
        s.sendall(b"x" * 100_000)
        first = s.recv(1)  # an answer: the connection has been open since before
        time.sleep(0.1)
        s.shutdown(socket.SHUT_WR)
        out["size"] = len(first + read_all(s))
    """
    before = time.time()
    seen = await run_inside(net, code, allow=["allowed.test", "127.0.0.0/8"],
                      given={"port": served.echo.port})  # fmt: skip
    assert seen.out == {"size": 100_003}
    [decision] = seen.proc.network
    assert decision.allowed
    assert (decision.door, decision.host, decision.port) == (
        "tcp", "allowed.test", served.echo.port)  # fmt: skip
    assert decision.address == "127.0.0.1"
    assert decision.rule == "127.0.0.0/8", "the name alone does not allow it"
    assert (decision.bytes_up, decision.bytes_down) == (100_000, 100_003)
    assert 100 <= decision.duration_ms < 60_000
    assert before <= decision.time <= time.time()
    assert decision.suggestion == decision.error == ""


@pytest.mark.parametrize("frontend", ["dns", "tcp", "http", "socks"])
async def test_a_refusal_suggests_the_entry_that_allows_it(
    net: sb.Session,
    served: Services,
    resolver: Resolver,
    caplog: pytest.LogCaptureFixture,
    frontend: str,
) -> None:
    """The suggested entry works, and one log line contains the reason."""
    host = "127.0.0.1" if frontend == "tcp" else "other.test"
    code = """
    ways = {"dns": lambda: send_and_read(("other.test", given["port"])),
            "tcp": lambda: send_and_read(("allowed.test", given["port"])),
            "http": lambda: tunnel("other.test", given["port"]).close(),
            "socks": lambda: socks("other.test", given["port"])}
    out["found"] = attempt(ways[given["frontend"]])
    """
    given = {"frontend": frontend, "port": served.echo.port}
    allow = ["allowed.test"] if frontend == "tcp" else ["127.0.0.1"]
    with caplog.at_level(logging.WARNING, logger=LOGGER):
        seen = await run_inside(net, code, allow=allow, given=given)
    assert seen.out["found"][1] < 2
    [refusal] = seen.refusals
    suggestion = host if frontend == "dns" else f"{host}:{served.echo.port}"
    assert (refusal.door, refusal.suggestion) == (frontend, suggestion)
    assert refusal.rule == ("internal" if frontend == "tcp" else "default")
    assert host in refusal.reason
    [record] = [record for record in caplog.records if record.name == LOGGER]
    assert suggestion in record.getMessage()
    assert refusal.reason in record.getMessage()
    again = await run_inside(net, code, allow=[*allow, suggestion], given=given)
    assert not again.refusals
    assert again.grants


async def test_a_failure_to_connect_is_not_a_refusal(
    net: sb.Session, resolver: Resolver, caplog: pytest.LogCaptureFixture
) -> None:
    """A closed port and an unknown name are allowed with an error and not logged."""
    code = """
    for name in ("allowed.test", "missing.test"):
        out[name] = [attempt(send_and_read, (name, 1))[0], attempt(tunnel, name, 1)[0]]
    """
    with caplog.at_level(logging.WARNING, logger=LOGGER):
        seen = await run_inside(net, code, allow=["allowed.test", "missing.test", "127.0.0.1"])
    assert seen.out == {
        "allowed.test": ["ECONNRESET", "EACCES"],
        "missing.test": ["ECONNRESET", "EACCES"],
    }
    assert not seen.refusals
    assert [bool(d.error) for d in seen.grants] == [True] * 4
    assert not [record for record in caplog.records if record.name == LOGGER]


async def test_a_program_cannot_forge_log_lines(
    net: sb.Session, caplog: pytest.LogCaptureFixture
) -> None:
    """A host name contains line breaks and escapes; the number of log lines is limited."""
    code = """
    out["forged"] = attempt(socks, b"x\\r\\n\\x1b[2Jrefused nothing\\xe2\\x80\\xae", 80)[0]
    for number in range(1100):
        attempt(socket.getaddrinfo, f"n{number}.test", 80)
    """
    with caplog.at_level(logging.WARNING, logger=LOGGER):
        seen = await run_inside(net, code, allow=["allowed.test"])
    lines = [record.getMessage() for record in caplog.records if record.name == LOGGER]
    assert all(line.isascii() and line.isprintable() for line in lines)
    assert len(lines) == 1001
    assert len(seen.refusals) == 1101
    assert all(d.host.isascii() and d.host.isprintable() for d in seen.refusals)


async def test_other_modes_record_no_decisions(net: sb.Session, served: Services) -> None:
    code = 'out["x"] = attempt(send_and_read, ("127.0.0.1", given["port"]))[0]'
    for mode, wanted in (("blocked", "ECONNREFUSED"), ("open", "hellobye")):
        seen = await run_inside(net, code, network_mode=mode, given={"port": served.echo.port})
        assert seen.out == {"x": wanted}
        assert seen.proc.network == ()
