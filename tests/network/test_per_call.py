"""The policy applies per call: concurrent and successive calls, deny-lists, arguments."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import TYPE_CHECKING, Any

import pytest
from tests.conftest import eventually
from tests.network.conftest import PUBLIC
from tests.network.inside import program, run_inside

from union import sandbox as sb

if TYPE_CHECKING:
    from tests.conftest import OpenSession
    from tests.network.conftest import Dialled, Resolver
    from tests.network.services import Services

pytestmark = pytest.mark.spec("C9", "F3")

_REACH = """
def reach(host):
    return send_and_read((host, given["port"]))
def connect(host):
    with tunnel(host, given["port"]):
        return "open"
for name in given["names"]:
    out[name] = [attempt(reach, name)[0], attempt(connect, name)[0]]
"""
REACHED, REFUSED = ["hellobye", "open"], ["gaierror", "EACCES"]


@pytest.mark.threat(96)
async def test_concurrent_calls_have_their_own_lists(net: sb.Session, served: Services) -> None:
    """Both calls run at the same time."""
    names = ["allowed.test", "other.test"]
    code = 'print("ready", flush=True); sys.stdin.readline()\n' + _REACH + "\ntime.sleep(0.2)"
    given = {"names": names, "port": served.echo.port}
    procs = [
        await net.run(
            program(code, given),
            script_type="python",
            stdin=sb.PIPE,
            stdout=True,
            network_mode="allowlist",
            network_allowlist=[name, "127.0.0.1"],
            timeout_s=20,
        )
        for name in names
    ]
    lines = [proc.iter_stdout_lines() for proc in procs]
    assert [await anext(stream) for stream in lines] == ["ready", "ready"]
    for proc in procs:
        assert proc.stdin is not None
        proc.stdin.write(b"go\n")
    found = [json.loads(line) for line in await asyncio.gather(*map(anext, lines))]
    assert found == [
        {"allowed.test": REACHED, "other.test": REFUSED},
        {"allowed.test": REFUSED, "other.test": REACHED},
    ]
    for own, other, proc in zip(names, names[::-1], procs, strict=True):
        await proc.wait()
        assert {d.host for d in proc.network if d.allowed} == {own}
        assert {d.host for d in proc.network if not d.allowed} == {other}


@pytest.mark.threat(98)
async def test_successive_calls_have_their_own_lists(net: sb.Session, served: Services) -> None:
    """Use a wide, a narrow, an empty, a blocked and again a wide network."""
    given = {"names": ["allowed.test"], "port": served.echo.port}
    for allow, wanted in (
        (["allowed.test", "127.0.0.1"], REACHED),
        (["other.test", "127.0.0.1"], REFUSED),
        ([], REFUSED),
        (None, ["gaierror", "ECONNREFUSED"]),
        (["allowed.test", "127.0.0.1"], REACHED),
    ):
        assert (await run_inside(net, _REACH, allow=allow, given=given)).out == {
            "allowed.test": wanted
        }


@pytest.mark.threat(172)
async def test_a_call_narrows_the_sessions_list_and_cannot_widen_it(
    open_isolated: OpenSession, served: Services
) -> None:
    given = {"names": ["allowed.test", "other.test"], "port": served.echo.port}
    both = ["allowed.test", "other.test", "127.0.0.1"]
    async with open_isolated(network_mode="allowlist", network_allowlist=both) as session:
        for options, wanted in (
            ({}, [REACHED, REACHED]),
            ({"network_allowlist": ["other.test", "127.0.0.1"]}, [REFUSED, REACHED]),
            ({"network_mode": "blocked"}, [["gaierror", "ECONNREFUSED"]] * 2),
            ({}, [REACHED, REACHED]),
        ):
            seen = await run_inside(session, _REACH, given=given, **options)
            assert list(seen.out.values()) == wanted, options
    async with open_isolated(
        network_mode="allowlist", network_allowlist=["allowed.test", "127.0.0.1"]
    ) as session:
        for wider in ({"network_allowlist": ["other.test"]}, {"network_mode": "open"}):
            with pytest.raises(sb.PolicyError, match="the session allows"):
                await session.run("touch started", **wider)
        assert not await session.exists("started")


@pytest.mark.threat(93)
async def test_a_deny_list_without_a_mode_applies_to_every_call(
    open_isolated: OpenSession, served: Services
) -> None:
    given = {"names": ["allowed.test", "other.test"], "port": served.echo.port}
    allow = ["allowed.test", "other.test", "127.0.0.1"]
    for denied, wanted in ([], [REACHED, REACHED]), (["other.test"], [REACHED, REFUSED]):
        async with open_isolated(network_denylist=denied) as session:
            seen = await run_inside(session, _REACH, given=given, allow=allow)
            assert list(seen.out.values()) == wanted
            assert (await session.run("true")).isolation.egress == "kernel", "blocked by default"


@pytest.mark.threat(98)
@pytest.mark.spec("C8", "F1", "F2")
async def test_a_daemon_of_an_open_call_cannot_serve_a_blocked_call(
    net: sb.Session, served: Services
) -> None:
    """The daemon relays to the host's network over TCP and unix sockets."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    daemon = """
    socket.create_connection(("127.0.0.1", given["echo"])).close()
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        os.close(0), os.close(1), os.close(2)
        def serve(listener):
            while True:
                near = listener.accept()[0]
                far = socket.create_connection(("127.0.0.1", given["echo"]))
                near.sendall(far.recv(1) or b"relayed")
        listeners = [socket.create_server(("127.0.0.1", given["port"]))]
        for path in (os.getcwd() + "/relay", "/tmp/relay", given["abstract"]):
            s = socket.socket(socket.AF_UNIX)
            s.bind(path)
            s.listen()
            listeners.append(s)
        for listener in listeners:
            threading.Thread(target=serve, args=(listener,)).start()
        time.sleep(60)
        os._exit(0)
    here = ("127.0.0.1", given["port"])
    for _ in range(100):
        time.sleep(0.1)
        out["alive"] = attempt(lambda: socket.create_connection(here).close())[0]
        if out["alive"] is None:
            break
    """
    # With the host's network, abstract names are shared with concurrent tests.
    given = {"port": port, "echo": served.echo.port, "abstract": f"\0relay-{port}"}
    seen = await run_inside(net, daemon, given=given, network_mode="open")
    assert seen.out == {"alive": None}, "control: the relay ran and reached the host"
    attack = """
    def path(address):
        with socket.socket(socket.AF_UNIX) as s:
            s.settimeout(2)
            s.connect(address)
            return s.recv(10).decode()
    out["tcp"] = attempt(send_and_read, ("127.0.0.1", given["port"]))[0]
    for address in ("relay", "/tmp/relay", given["abstract"]):
        out[address] = attempt(path, address)[0]
    """
    for options in ({"network_mode": "blocked"}, {"allow": ["allowed.test"]}):
        found = (await run_inside(net, attack, given=given, **options)).out
        assert set(found.values()) <= {"ECONNREFUSED", "ENOENT"}, found
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
        pass


@pytest.mark.threat(93)
@pytest.mark.spec("F5")
@pytest.mark.parametrize("mode", ["open", "allowlist"])
async def test_a_deny_list_overrides_the_allow_list(
    open_isolated: OpenSession, served: Services, resolver: Resolver, dialled: Dialled, mode: str
) -> None:
    """Names, patterns, ranges and resolved addresses are denied by every frontend."""
    dialled.to_loopback |= {PUBLIC}
    resolver.table |= {
        "allowed.test": [PUBLIC],
        "front.test": ["169.254.169.254"],
        "part.test": [PUBLIC, "169.254.169.254"],
        "x.denied.test": [PUBLIC],
        "metadata.google.internal": [PUBLIC],
        "ec2.test": ["fd00:ec2::254"],
    }
    options: dict[str, Any] = {}
    if mode == "allowlist":
        names = [name for name in resolver.table if name not in sb.PYPI_HOSTS]
        options["network_allowlist"] = [*names, "169.254.0.0/16", "fd00::/8"]
    names = ["allowed.test", "part.test", "front.test", "x.denied.test", "ec2.test",
             "metadata.google.internal", "169.254.169.254", "0xa9fea9fe"]  # fmt: skip
    given = {"names": names, "port": served.echo.port}
    async with open_isolated(
        network_mode=mode,
        network_denylist=[*sb.CLOUD_METADATA_DENY, "*.denied.test"],
        **options,
    ) as session:
        assert session.isolation.egress == "kernel"
        seen = await run_inside(session, _REACH, given=given)
    assert seen.out.pop("allowed.test") == REACHED
    assert seen.out.pop("part.test") == REACHED, "reached at the address that is not denied"
    assert all(b == "EACCES" and a in {"gaierror", "ECONNRESET"} for a, b in seen.out.values())
    assert set(dialled.addresses) == {PUBLIC}
    rules = {d.rule for d in seen.refusals}
    assert rules == {"169.254.0.0/16", "*.denied.test", "fd00:ec2::/32", "metadata.google.internal"}
    assert {d.suggestion for d in seen.refusals} == {""}, "no allow entry permits it"


@pytest.mark.threat(77)
@pytest.mark.spec("F2", "F5")
async def test_an_open_network_with_a_deny_list_has_its_own_loopback(
    open_isolated: OpenSession, served: Services
) -> None:
    """`open` is the host's network; with a deny-list, loopback belongs to the sandbox."""
    given = {"names": ["127.0.0.1", "allowed.test"], "port": served.echo.port}
    async with open_isolated(network_mode="open") as session:
        out = (
            await run_inside(
                session, 'out["x"] = send_and_read(("127.0.0.1", given["port"]))', given=given
            )
        ).out
        assert out == {"x": "hellobye"}
    async with open_isolated(network_mode="open", network_denylist=["10.0.0.0/8"]) as session:
        out = (await run_inside(session, _REACH, given=given)).out
    assert out == {
        "127.0.0.1": ["ECONNREFUSED", "EACCES"],
        "allowed.test": ["ECONNRESET", "EACCES"],
    }
    assert served.echo.connections == 1


@pytest.mark.threat(81, 99)
@pytest.mark.spec("C10", "F7")
@pytest.mark.parametrize(
    "options, argument",
    [
        ({"network_mode": "Open"}, "network_mode"),
        ({"network_mode": "none"}, "network_mode"),
        ({"network_mode": ""}, "network_mode"),
        ({"network_mode": 1}, "network_mode"),
        ({"network_mode": "allow-list", "network_allowlist": ["a.test"]}, "network_mode"),
        ({"network_mode": "allowlist"}, "network_allowlist"),
        ({"network_allowlist": ["a.test"]}, "network_allowlist"),
        ({"network_mode": "open", "network_allowlist": ["a.test"]}, "network_allowlist"),
        ({"network_mode": "blocked", "network_denylist": ["a.test"]}, "network_denylist"),
        ({"network_mode": "blocked", "network_proxy_url": "http://a.test:1"}, "network_proxy_url"),
        ({"network_mode": "blocked", "network_socks_url": "socks5://a:1"}, "network_socks_url"),
        ({"network_mode": "open", "network_proxy_url": "ftp://a.test"}, "network_proxy_url"),
        ({"network_mode": "open", "network_denylist": "a.test"}, "network_denylist"),
        *(
            ({"network_mode": "allowlist", "network_allowlist": value}, "network_allowlist")
            for value in ("a.test", ["https://a.test"], ["*"], ["a.*.test"], ["10.0.0.0/33"],
                          ["a.test:0"], ["a.test:65536"], ["a b.test"], [""], [1], ["a.test/x"])
        ),
    ],
)  # fmt: skip
async def test_arguments_are_checked_before_anything_starts(
    open_isolated: OpenSession, options: dict[str, Any], argument: str
) -> None:
    """Both the session and the call check their arguments."""
    with pytest.raises(sb.SandboxUsageError) as raised:
        open_isolated(**options)
    assert raised.value.argument == argument
    assert argument in str(raised.value)
    if set(options) <= {"network_mode", "network_allowlist"}:
        async with open_isolated() as session:
            with pytest.raises(sb.SandboxUsageError) as raised:
                await session.run("true", **options)
            assert raised.value.argument == argument


@pytest.mark.threat(96)
@pytest.mark.spec("B6")
async def test_a_closed_session_leaves_no_listener(
    open_isolated: OpenSession, served: Services
) -> None:
    """A background run and its listeners end with the session."""
    async with open_isolated() as session:
        proc = await session.run(
            program(
                's = socket.create_connection(("allowed.test", given["port"]))\n'
                's.sendall(b"x"); s.recv(1)\nprint("up", flush=True); time.sleep(60)',
                {"port": served.echo.port},
            ),
            script_type="python",
            stdout=True,
            background=True,
            network_mode="allowlist",
            network_allowlist=["allowed.test", "127.0.0.1"],
        )
        assert await anext(proc.iter_stdout_lines()) == "up"
    assert eventually(lambda: proc.returncode is not None)
    assert [(d.host, d.bytes_up, d.bytes_down) for d in proc.network] == [("allowed.test", 1, 1)]
