"""A connection that one run hands to another, over a path socket in the work dir they share."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING

import pytest
from tests.conftest import session_of
from tests.network.conftest import PUBLIC, Dialled

from union import sandbox as sb
from union.sandbox._linux import kernel
from union.sandbox._net import dialer

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.threat(164), pytest.mark.spec("C9", "F1")]

GIVE = """
import array, os, socket
proxy = int(os.environ["HTTP_PROXY"].rpartition(":")[2])
with socket.socket(socket.AF_UNIX) as listener:
    listener.bind("relay.sock")
    listener.listen()
    print("ready", flush=True)
    near, _ = listener.accept()
far = socket.create_connection(("127.0.0.1", proxy))
far.sendall(b"CONNECT 127.0.0.1:PORT HTTP/1.1\\r\\n\\r\\n")
assert b" 200 " in far.recv(4096)
near.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [far.fileno()]))])
near.recv(1)
"""
TAKE = """
import array, socket, sys
near = socket.socket(socket.AF_UNIX)
try:
    near.connect("relay.sock")
except PermissionError:
    sys.exit(print("refused by the kernel", flush=True))
_, ancillary, _, _ = near.recvmsg(1, socket.CMSG_LEN(4))
far = socket.socket(fileno=array.array("i", ancillary[0][2])[0])
far.settimeout(30)
far.sendall(b"while it runs")
print(far.recv(100).decode(), flush=True)
sys.stdin.readline()
try:
    far.sendall(b"later")
    print(far.recv(100).decode() or "ended")
except OSError:
    print("ended")
"""
WITHIN = """
import array, os, socket, threading
listener = socket.socket(socket.AF_UNIX)
listener.bind("own.sock")
listener.listen()
def serve():
    near, _ = listener.accept()
    one, other = socket.socketpair()
    near.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [one.fileno()]))])
    other.sendall(b"passed")
    near.recv(1)
threading.Thread(target=serve, daemon=True).start()
near = socket.socket(socket.AF_UNIX)
near.connect(os.path.abspath("own.sock"))
_, ancillary, _, _ = near.recvmsg(1, socket.CMSG_LEN(4))
print(socket.socket(fileno=array.array("i", ancillary[0][2])[0]).recv(100).decode())
"""


@pytest.fixture
def service() -> Iterator[int]:
    """Sends back what it gets; returns its port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer(accepted: socket.socket) -> None:
            with accepted:
                try:
                    while data := accepted.recv(100):
                        accepted.sendall(data)
                except ConnectionError:
                    return

        def serve() -> None:
            while True:
                try:
                    accepted, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(target=answer, args=(accepted,), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("backend", ["bubblewrap", "userns"])
@pytest.mark.parametrize(
    "persist, mode",
    [
        ("workdir", "allowlist"),
        pytest.param("machine", "allowlist", marks=pytest.mark.spec("R1")),
        pytest.param("machine", "open", marks=pytest.mark.spec("R1")),
    ],
)
async def test_a_connection_ends_with_the_run_that_made_it(
    backend: str, persist: str, mode: str, service: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control is in the same run: as long as the first one runs, the connection works."""
    wide: dict[str, object] = {"network_mode": mode}
    address = "127.0.0.1"
    if mode == "allowlist":
        wide["network_allowlist"] = [f"{address}:{service}"]
    else:
        dialled, address = Dialled(dialer.connect_any), PUBLIC
        dialled.to_loopback.add(PUBLIC)
        monkeypatch.setattr(dialer, "connect_any", dialled)
    async with session_of(backend, persist=persist) as session:
        giver = await session.run(
            GIVE.replace("127.0.0.1:PORT", f"{address}:{service}"),
            script_type="python",
            stdout=True,
            **wide,
        )
        assert await anext(giver.iter_stdout_lines()) == "ready"
        taker = await session.run(
            TAKE, script_type="python", stdin=sb.PIPE, stdout=True, network_mode="blocked"
        )
        lines = taker.iter_stdout_lines()
        first = await anext(lines)
        if kernel.landlock_abi() >= 9:
            assert first == "refused by the kernel"
        else:
            assert first == "while it runs"
            giver.kill()
            await giver.wait()
            assert taker.stdin is not None
            taker.stdin.write(b"go on\n")
            assert await anext(lines) == "ended"
        giver.kill()
        taker.kill()


@pytest.mark.parametrize("backend", ["bubblewrap", "userns"])
@pytest.mark.parametrize("mode", ["blocked", "open"])
async def test_path_sockets_within_one_run_work(backend: str, mode: str) -> None:
    async with session_of(backend, network_mode=mode) as session:
        assert await session.run_code(WITHIN) == "passed\n"


@pytest.mark.parametrize("backend", ["bubblewrap", "userns"])
async def test_a_session_with_a_ceiling_has_no_wider_run_to_take_from(backend: str) -> None:
    """How a caller rules it out where the kernel does not: no run of the session is open."""
    async with session_of(backend, network_mode="blocked") as session:
        for wider in (
            {"network_mode": "open"},
            {"network_mode": "allowlist", "network_allowlist": ["a.example"]},
        ):
            with pytest.raises(sb.PolicyError):
                await session.run("true", **wider)
