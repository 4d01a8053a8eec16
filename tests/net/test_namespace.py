"""The frontends with a real network namespace, whose only ways out are its listeners."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest
from tests.conftest import SOON_S
from tests.net.harness import FakeResolver, echo, rules, serving

from union.sandbox._codecs import netlink
from union.sandbox._net.egress import Egress
from union.sandbox._net.policy import Policy

CHILD = os.path.join(os.path.dirname(__file__), "namespace_child.py")
SOURCES = os.path.abspath(os.path.join(os.path.dirname(netlink.__file__), "../../.."))
LOOPBACK = "127.0.0.0/8"
UNPRIVILEGED_UID = 65534


def may_unshare():
    command = ["unshare", "-Urn", "true"]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


pytestmark = pytest.mark.skipif(
    not may_unshare(),
    reason="user namespaces are disabled: sysctl user.max_user_namespaces=10000",
)


class Inside:
    """One namespace with its Egress; ``python`` runs code in it and returns its output."""

    def __init__(self, directory, policy, table, *, uid, interpreter):
        self.policy = policy
        self.resolver = FakeResolver(table)
        self.decisions = []
        self.uid = uid
        self.interpreter = interpreter
        self.resolv = directory / "resolv.conf"
        self.resolv.write_text("nameserver 127.0.0.53\n")

    async def run(self, *argv, env=None, limit_s=20):
        ours, theirs = socket.socketpair()
        as_user = (
            {} if self.uid is None else {"user": self.uid, "group": self.uid, "extra_groups": []}
        )
        process = await asyncio.create_subprocess_exec(
            self.interpreter, CHILD, str(theirs.fileno()), str(self.resolv), *argv,
            pass_fds=[theirs.fileno()],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={"PYTHONPATH": SOURCES, "PATH": os.environ["PATH"], **(env or {})},
            **as_user,
        )  # fmt: skip
        theirs.close()
        ours.setblocking(False)
        loop = asyncio.get_running_loop()
        ready = loop.create_future()
        loop.add_reader(ours, lambda: ready.done() or ready.set_result(None))
        await asyncio.wait_for(ready, limit_s)
        loop.remove_reader(ours)
        _data, fds, _flags, _address = socket.recv_fds(ours, 1, 6)
        if len(fds) != 6:
            ours.close()
            raise AssertionError((await process.communicate())[0].decode())
        names = ("tcp_transparent", "tcp_transparent6", "dns_udp", "dns_tcp", "http", "socks")
        egress = Egress(
            Policy(self.policy),
            **{name: socket.socket(fileno=fd) for name, fd in zip(names, fds, strict=True)},
            resolver=self.resolver,
            on_decision=self.decisions.append,
        )
        egress.start()
        try:
            ours.send(b"g")
            output, _ = await asyncio.wait_for(process.communicate(), limit_s)
        finally:
            ours.close()
            await egress.aclose()
        return output.decode().strip()

    async def python(self, code, **options):
        return await self.run(self.interpreter, "-c", textwrap.dedent(code), **options)


def interpreter_for(uid):
    """Return an interpreter that this user can execute; None if there is none."""
    code = f"import sys; sys.path.insert(0, {SOURCES!r}); import union.sandbox._codecs.netlink"
    for path in (sys.executable, shutil.which("python3", path="/usr/local/bin:/usr/bin")):
        if path is None:
            continue
        command = [path, "-I", "-c", code]
        try:
            subprocess.run(
                command, user=uid, group=uid, extra_groups=[], check=True, capture_output=True
            )
        except (OSError, subprocess.CalledProcessError):
            continue
        return path
    return None


@pytest.fixture(params=["current user", "unprivileged"])
def inside(request):
    uid, interpreter = None, sys.executable
    if request.param == "unprivileged":
        if os.geteuid() != 0:
            pytest.skip("the test process is already unprivileged: run as root to cover both")
        uid, interpreter = UNPRIVILEGED_UID, interpreter_for(UNPRIVILEGED_UID)
        if interpreter is None:
            pytest.skip(
                "no Python 3.11+ that uid 65534 can execute with this checkout: install python3, "
                "and keep the checkout where other users can read it"
            )
    # Other pytest processes reset the mode of the parents of tmp_path, so it is not used here.
    with tempfile.TemporaryDirectory(prefix="test-namespace-") as name:
        directory = Path(name)
        directory.chmod(0o755)
        yield lambda allow=(), deny=(), table=None: Inside(
            directory, rules(allow, deny), table or {}, uid=uid, interpreter=interpreter
        )


async def test_a_raw_connect_by_name_needs_no_proxy_variable(inside):
    async with serving(echo) as port:
        ns = inside(["a.example", LOOPBACK], table={"a.example": ["127.0.0.1"]})
        out = await ns.python(f"""
            import socket
            for family in (socket.AF_INET, socket.AF_INET6):
                info = socket.getaddrinfo("A.example", {port}, family, socket.SOCK_STREAM)[0]
                with socket.socket(family) as sock:
                    sock.connect(info[4])
                    sock.sendall(b"hello")
                    print(sock.recv(10).decode())
        """)
    assert out.split() == ["hello", "hello"]
    assert [(d.door, d.host, d.port, d.allowed) for d in ns.decisions] == [
        ("tcp", "a.example", port, True)
    ] * 2


async def test_all_other_destinations_fail_immediately_with_an_error(inside):
    async with serving(echo) as port:
        ns = inside(["a.example"], table={"a.example": ["127.0.0.1"]})
        started = time.monotonic()
        out = await ns.python(f"""
            import socket
            def attempt(what, family, kind, address):
                with socket.socket(family, kind) as sock:
                    sock.settimeout(5)
                    try:
                        sock.connect(address)
                        sock.send(b"x")
                        print(what, repr(sock.recv(10)))
                    except OSError as exc:
                        print(what, type(exc).__name__)
            four, six = socket.AF_INET, socket.AF_INET6
            tcp, udp = socket.SOCK_STREAM, socket.SOCK_DGRAM
            for address in ("203.0.113.5", "10.0.0.1", "169.254.169.254", "192.168.0.1", "8.8.8.8"):
                attempt("tcp", four, tcp, (address, {port}))
            for address in ("2001:db8::1", "fd00:ec2::254", "fe80::1", "::ffff:169.254.169.254"):
                attempt("tcp", six, tcp, (address, {port}))
            attempt("own", four, tcp, ("127.0.0.1", {port}))
            attempt("own", six, tcp, ("::1", {port}))
            attempt("listener", four, tcp, ("127.0.0.1", 12345))
            attempt("udp", four, udp, ("8.8.8.8", 53))
            attempt("udp", six, udp, ("2001:4860:4860::8888", 53))
            try:
                socket.getaddrinfo("evil.example", 80)
            except socket.gaierror as exc:
                print("name", exc.errno == socket.EAI_NONAME)
            try:
                socket.socket(four, udp, socket.IPPROTO_ICMP)
            except OSError as exc:
                print("ping", type(exc).__name__)
        """)
        took = time.monotonic() - started
    lines = [line.split(" ", 1) for line in out.splitlines()]
    # fe80::1 has no zone, so the kernel itself refuses it.
    assert {value for what, value in lines if what == "tcp"} <= {"ConnectionResetError", "OSError"}
    assert [value for what, value in lines if what == "own"] == ["ConnectionRefusedError"] * 2
    assert ["listener", "ConnectionResetError"] in lines
    assert [value for what, value in lines if what == "udp"] == ["ConnectionRefusedError"] * 2
    assert ["name", "True"] in lines
    assert ["ping", "PermissionError"] in lines
    assert len(lines) == 16
    assert took < SOON_S
    assert ns.resolver.queries == []
    assert not any(d.allowed for d in ns.decisions)
    assert {"203.0.113.5", "169.254.169.254", "2001:db8::1", "evil.example"} <= {
        d.host for d in ns.decisions
    }


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is missing: install curl")
@pytest.mark.parametrize(
    "proxies",
    [{}, {"ALL_PROXY": "socks5h://127.0.0.1:1080"}, {"http_proxy": "http://127.0.0.1:3128"}],
)
async def test_curl_with_and_without_proxy_variables(inside, proxies):
    async def web(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello")
        await writer.drain()

    curl = shutil.which("curl")
    async with serving(web) as port:
        ns = inside(["a.example", LOOPBACK], table={"a.example": ["127.0.0.1"]})
        out = await ns.run(curl, "-sS", "-m", "5", f"http://a.example:{port}/", env=proxies)
        assert out == "hello"
        out = await ns.run(curl, "-sS", "-f", "-m", "5", f"http://b.example:{port}/", env=proxies)
        assert "hello" not in out
        assert "timed out" not in out
    assert ns.resolver.queries == ["a.example"]


async def test_two_namespaces_with_different_lists_are_independent(inside):
    async with serving(echo) as port:
        code = f"""
            import socket
            try:
                with socket.create_connection(("a.example", {port}), 5) as sock:
                    sock.sendall(b"hello")
                    print(sock.recv(10).decode())
            except OSError as exc:
                print(type(exc).__name__)
        """
        table = {"a.example": ["127.0.0.1"]}
        wide, narrow = (
            inside(["a.example", LOOPBACK], table=table),
            inside(["b.example"], table=table),
        )
        assert await asyncio.gather(wide.python(code), narrow.python(code)) == ["hello", "gaierror"]


async def test_large_transfers_arrive_whole(inside):
    async with serving(echo) as port:
        ns = inside(["a.example", LOOPBACK], table={"a.example": ["127.0.0.1"]})
        out = await ns.python(f"""
            import hashlib, os, socket, threading
            data = os.urandom(1 << 20) * 16
            sock = socket.create_connection(("a.example", {port}))
            def push():
                sock.sendall(data)
                sock.shutdown(socket.SHUT_WR)
            threading.Thread(target=push).start()
            got = hashlib.sha256()
            while piece := sock.recv(1 << 16):
                got.update(piece)
            print(got.digest() == hashlib.sha256(data).digest())
        """)
    assert out == "True"
    assert [(d.bytes_up, d.bytes_down) for d in ns.decisions] == [(16 << 20, 16 << 20)]
