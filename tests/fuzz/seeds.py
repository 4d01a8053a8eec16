"""Where the fuzzers begin: what the product itself encodes, and what real peers send.

They are made anew each time, so that they stay what is encoded now. What searches found to reach
further is kept in the corpus.
"""

from __future__ import annotations

import contextlib
import ssl
import struct
from pathlib import Path
from typing import Any, Final

from tests.fuzz import archives
from tests.fuzz.targets_wire import BACKENDS, ISOLATION, NEXT_MESSAGE, SESSION

from union.sandbox._codecs import dns
from union.sandbox._contexts import frames
from union.sandbox._contexts import wire as cells
from union.sandbox._contexts.specs import ContextSpec, resolve_cell, resolve_request, resolve_set
from union.sandbox._contexts.values import CellEnd, ErrorInfo, FrameInfo, MimeBundle
from union.sandbox._core.events import Exited, Failed, Started, Usage
from union.sandbox._core.file_errors import SandboxFileNotFoundError
from union.sandbox._core.files import FileInfo
from union.sandbox._core.resolve import resolve_run, resolve_session
from union.sandbox._core.resources import Resources
from union.sandbox._files import inside_frames
from union.sandbox._linux.command import Command, packed_rlimits
from union.sandbox._linux.protocol import (
    EXEC,
    EXITED,
    PREPARE,
    SIMPLE,
    ExecFlag,
    FailurePlace,
    Message,
    PrepareFlag,
)
from union.sandbox._plan import plan as p
from union.sandbox._policy.decision import Decision
from union.sandbox._wire import frames as wire
from union.sandbox._wire import values as wire_values
from union.sandbox._wire.errors import encode_error
from union.sandbox._wire.frames import Kind, Offsets, Taken
from union.sandbox.errors import PolicyError

HERE: Final = Path(__file__).parent
CLONE_NEWUSER: Final = 0x10000000
REGRESSIONS: Final = HERE / "regressions"

STEPS: Final[tuple[p.Step, ...]] = (
    p.Root("/tmp", "size=1m,mode=755"),
    p.Bind("/usr", "/usr"),
    p.Bind("", "/work", attrs=6, fd=0, idmap=1, identity=(2049, 77)),
    p.Mkdir("/a"),
    p.File("/etc/hosts", b"127.0.0.1 localhost\n"),
    p.Symlink("/lib", "usr/lib"),
    p.Tmpfs("/tmp", 1 << 20),
    p.Proc("/proc"),
    p.Devpts("/dev/pts"),
    p.Remount("/"),
    p.Hostname("sandbox"),
    p.Netlink(0, struct.pack("=IHHII", 16, 16, 5, 1, 0), 1),
    p.Listen(2, 1, struct.pack("=HH4s8x", 2, 0x5000, b"\x7f\0\0\1")),
    p.Slot("/script"),
    p.Enter(move=True),
    p.Detach(),
    p.Identity("/work", (2049, 77)),
    p.Attrs("/usr", 7),
    p.Resize("/tmp", 0o1777, "size=1m"),
    p.Lockdown(),
    p.LandlockCreate(0xFFFF, 3, 3, 24),
    p.LandlockPath("/usr", 13),
    p.LandlockRestrict(),
    p.Seccomp(struct.pack("=HBBI", 6, 0, 0, 0x7FFF0000)),
    p.Rlimit(7, 1024, 1024),
    p.Subreaper(),
)


def _plans() -> list[bytes]:
    wrapped = p.Wrap("/usr/bin/bwrap", ("--unshare-all", "--proc", "/proc"), STEPS[-6:])
    entered = p.Wrap("/usr/bin/bwrap", (), STEPS[4:6], enter=((0, 1000), (0, 1000)))
    return [
        p.encode(STEPS),
        p.encode(()),
        *(p.encode((step,)) for step in (*STEPS, p.Share())),
        p.encode((STEPS[0], wrapped)),
        p.encode((entered,)),
    ]


def _execs() -> list[bytes]:
    found = []
    streams = ExecFlag.STDIN | ExecFlag.STDOUT | ExecFlag.STDERR
    every = streams | ExecFlag.SCRIPT | ExecFlag.PAYLOAD | ExecFlag.WAIT
    cases: list[tuple[int, int, tuple[tuple[int, int, int], ...]]] = [
        (0, 0, ()),
        (streams, 3, ((7, 64, 64),)),
        (every, 6, ((0, 1, 2),) * 3),
    ]
    for flags, fds, limits in cases:
        command = Command(
            programs=("/bin/sh", "/usr/bin/sh"),
            argv=("sh", "-c", "echo hi"),
            env=("PATH=/bin", "A=b"),
            cwd="/work",
            rlimits=packed_rlimits(limits),
        )
        body = command.body()
        head = EXEC.pack(Message.EXEC, flags, 0, len(limits), 2, 3, 2, len(body), 24, 80)
        found.append(bytes([fds | 1 << 3]) + head + body)
    return found


def _messages() -> list[bytes]:
    simple = [
        SIMPLE.pack(kind, 7, 9, 0)
        for kind in (
            Message.ATTACH,
            Message.KILL,
            Message.KILL_ALL,
            Message.LOCATE,
            Message.SIGNAL,
            Message.READY,
            Message.FAILED,
        )
    ]
    mapped = PrepareFlag.DENY_SETGROUPS | PrepareFlag.MAP_IDS
    prepare = [
        PREPARE.pack(
            Message.PREPARE, 1, CLONE_NEWUSER, flags, 0, 1000, 0, 1000, cgroups, 0, 0, 0, 0
        )
        for flags, cgroups in ((mapped, 0), (PrepareFlag.COPY, 1), (PrepareFlag.WRAPPED, 3))
    ]
    userns = PREPARE.pack(Message.USERNS, 0, 0, 0, 0, 1000, 0, 1000, 0, 0, 0, 0, 0)
    texts = [*simple, *prepare, userns, _execs()[0][1:], bytes(300)]
    return [bytes([count % 4]) + text for count, text in enumerate(texts)]


def _netlink() -> list[bytes]:
    def ack(error: int, echoed: bytes = b"") -> bytes:
        size = 36 + len(echoed)
        return struct.pack("=IHHIIiIHHII", size, 2, 0, 1, 7, error, 16, 16, 5, 1, 0) + echoed

    return [ack(0), ack(0) + ack(0), ack(-1, bytes(12)), struct.pack("=IHHIIi", 20, 3, 2, 1, 7, 0)]


def _hello(name: str | None) -> bytes:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.create_default_context()
    context.check_hostname = False
    context.set_ciphers("ECDHE+AESGCM")
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing, server_hostname=name).do_handshake()
    return outgoing.read()


def _query(name: str, kind: int, *, edns: bool = False) -> bytes:
    head = struct.pack(">6H", 7, 0x0100, 1, 0, 0, int(edns))
    question = dns.encode_name(name) + struct.pack(">HH", kind, 1)
    return head + question + (b"\0" + struct.pack(">HHIH", 41, 1232, 0, 0) if edns else b"")


def _http() -> list[bytes]:
    a = b"Host: allowed.test\r\n"
    chunks = b"3;x=y\r\nabc\r\n0\r\nT: u\r\n\r\n"
    login = b"Proxy-Authorization: Basic bWU6c2VjcmV0\r\n"
    return [
        b"GET http://allowed.test/hello HTTP/1.1\r\n" + a + b"\r\n",
        b"CONNECT allowed.test:443 HTTP/1.1\r\n\r\n",
        b"POST http://allowed.test/ HTTP/1.1\r\n" + a + b"Content-Length: 3\r\n\r\nabc",
        b"POST http://allowed.test/ HTTP/1.1\r\n"
        + a
        + b"Transfer-Encoding: chunked\r\n\r\n"
        + chunks,
        b"GET http://a.wild.test/?q HTTP/1.0\r\nConnection: close, x\r\nX: y\r\n\r\n",
        b"GET http://[2001:db8::1]:80/ HTTP/1.1\r\nHost: [2001:db8::1]\r\n" + login + b"\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 No Content\r\n\r\n",
    ]


def _http_proxy() -> list[bytes]:
    answers = (
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n",
        b"HTTP/1.0 404 No\r\n\r\nbody to the end",
    )
    login = b"Host: allowed.test\r\nProxy-Authorization: Basic bWU6c2VjcmV0\r\n"
    both = b"Host: allowed.test\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n"
    found = [
        b"\xff" + _http()[5],
        b"\xffGET http://allowed.test/ HTTP/1.1\r\n" + login + b"\r\n\0\0\0\0" + answers[0],
        b"\1POST http://allowed.test/ HTTP/1.1\r\n" + both + b"\r\n0\r\n\r\n\0\0\0\0" + answers[0],
    ]
    for number, request in enumerate(_http()[:6]):
        answer = answers[number % 3]
        found += [b"\1" + request + request + b"\0\0\0\0" + answer, b"\0" + request]
    return found


def _values() -> dict[str, list[bytes]]:
    session = resolve_session(
        backend="userns",
        backends=BACKENDS,
        network_mode="allowlist",
        network_allowlist=["allowed.test:443", "192.0.2.0/24"],
        network_denylist=["*.bad.test"],
        network_proxy_url="http://u:p@proxy.test:3128",
        timeout_s=5,
        env={"A": "ä"},
        read_only_paths=["/opt"],
        resources=Resources(memory="64Mi", cpu=0.5, processes=9),
        preload=["json"],
    )
    runs = [
        resolve_run(SESSION, "echo hi", stdout=True, stdin=True, cwd="/x", timeout_s=1.5),
        resolve_run(SESSION, "print(1)", script_type="python", stdin=b"data", env={"B": "c"}),
        resolve_run(SESSION, ["ls", "-l"], pty=(24, 80), background=True),
    ]
    decision = Decision(
        time=1.0, door="http", host="h", address="192.0.2.1", port=443, allowed=True, rule="r",
        reason="y", suggestion="", error="", bytes_up=1, bytes_down=2, duration_ms=0.5,
    )  # fmt: skip
    events = [
        wire_values.encode_started(Started(2), ISOLATION),
        wire_values.encode_event(Exited(1, "signal", Usage(cpu_user_s=0.25, max_rss_bytes=4096))),
        wire_values.encode_event(Failed("spawn", "no", "code", "hint")),
        wire_values.encode_decision(decision),
        wire.to_json({"refused": encode_error(PolicyError("no", argument="network_mode"))}),
    ]
    session_info = wire_values.SessionInfo(
        session="s",
        work_dir="/w",
        isolation=ISOLATION,
        fs_allowlist={"read_only": ("/usr",), "read_write": ()},
        grace_s=30.0,
    )
    info = FileInfo(path="a", kind="file", size=3, mode=0o644, mtime=1.5)
    missing = SandboxFileNotFoundError("no such file", path="a/b", number=2)
    bodies = [wire_values.encode_run(spec, SESSION) for spec in runs]
    plain = {
        b"s": [wire_values.encode_session(session), {}],
        b"f": [wire_values.encode_session_info(session_info)],
        b"i": [wire_values.encode_file(info)],
        b"x": [encode_error(missing), encode_error(PolicyError("no", argument="cmd"))],
    }
    encoded = [kind + wire.to_json(value) for kind, found in plain.items() for value in found]
    encoded += [b"r" + body for body in bodies] + [b"e" + event for event in events]
    return {"values": encoded, "events": events, "bodies": bodies}


def _frames() -> dict[str, list[bytes]]:
    made = _values()
    started, exited, failed, decision, refused = made["events"]

    def event(number: int, data: bytes) -> bytes:
        return wire.encode_numbered(Kind.EVENT, 1, number, data)

    def piece(fd: int, offset: int, data: bytes) -> bytes:
        return wire.encode_output_head(1, fd, offset, len(data)) + data

    output = piece(1, 0, b"hello") + piece(2, 0, b"oh")
    ends = wire.encode_end_of_output(1, 1, 5) + wire.encode_end_of_output(1, 2, 2)
    taken = wire.encode_taken(1, Taken(1, 10, broken=False))
    client = [
        event(0, started) + output + event(1, decision) + event(2, exited) + ends,
        event(0, refused),
        event(0, started) + taken + event(1, failed),
        output + output + wire.encode(Kind.UNKNOWN, 1),
        output + piece(1, 9, b"after a gap"),
    ]
    start = [b"".join(wire.encode_start(1, body)) for body in made["bodies"]]
    control = [
        wire.encode_numbered(Kind.CONTROL, 1, number, wire.to_json(encoded))
        for number, encoded in enumerate(
            (
                {"op": "signal", "signum": 15},
                {"op": "resize", "rows": 24, "cols": 80},
                {"op": "eof"},
                {"op": "end", "cause": "timeout"},
            ),
            start=2,
        )
    ]
    stdin = wire.encode_numbered(Kind.STDIN, 1, 1, b"data")
    ack = wire.encode_offsets(Kind.ACK, 1, Offsets(10, 0, 1))
    attach = wire.encode_offsets(Kind.ATTACH, 1, Offsets(5, 0, 0))
    server = [
        NEXT_MESSAGE.join((begin, stdin + b"".join(control), ack, attach, wire.encode(Kind.CLOSE)))
        for begin in start
    ]
    server += [wire.encode_offsets(Kind.ATTACH, 9, Offsets()), start[0][:-3]]
    for odd in (
        {"op": "signal", "signum": 99},
        {"op": "signal", "signum": -1},
        {"op": "resize", "rows": 0, "cols": 99999},
        {"op": "end", "cause": "oom"},
    ):
        server.append(start[0] + wire.encode_numbered(Kind.CONTROL, 1, 1, wire.to_json(odd)))
    return {"client": client, "server": server}


def _driver_frames() -> list[bytes]:
    """What the driver of a Python context sends, each packet after its length."""
    error = {
        "name": "KeyError",
        "value": "1",
        "traceback": "Traceback",
        "frames": [{"file": "<cell 1>", "line": 2, "function": "f", "text": "f()"}],
    }
    parts = [
        {"mime": "text/plain", "size": 2, "raw": False},
        {"mime": "image/png", "size": 3, "raw": True},
    ]
    messages: list[tuple[dict[str, object], bytes]] = [
        ({"t": "ready"}, b""),
        ({"t": "display", "n": 1, "result": True, "parts": parts}, b"42PNG"),
        ({"t": "done", "n": 1, "error": error, "user_s": 0.5, "rss": 4096, "dropped": 1}, b""),
        ({"t": "done", "n": 1, "error": None, "value": True}, b"[1]"),
    ]
    packets = [list(frames.encode(head, raw)) for head, raw in messages]
    every = [packet for message in packets for packet in message]
    return [
        b"".join(struct.pack(">H", len(packet)) + packet for packet in found)
        for found in (*packets, every)
    ]


def _cells() -> list[bytes]:
    """A context, its cells, and what a server sends about them; a letter selects the decoder."""
    bundle = MimeBundle(kind="result", data={"text/plain": "4", "image/png": b"PNG"})
    error = ErrorInfo(
        name="KeyError",
        value="1",
        traceback="Traceback",
        frames=(FrameInfo(file="<cell 1>", line=2, function="f", text="f()"),),
    )
    shown = cells.encode_display(bundle, (2, 1))
    ends = [
        cells.encode_end(CellEnd(error=error, dropped=1)),
        cells.encode_end(CellEnd(value=b"[1]", exit_code=3)),
        cells.encode_end(CellEnd(ended="oom", state="lost", reason="memory")),
    ]
    specs = [
        resolve_cell(SESSION, "python", "x = 1", env={"A": "b"}, timeout_s=1.5),
        resolve_cell(SESSION, "python", "1", network_mode="allowlist", network_allowlist=["a.b"]),
        resolve_set("python", {"x": [1, None]}),
        resolve_request("get", "x", "python", timeout_s=None),
    ]
    context = ContextSpec(language="bash", env=(("A", "b"),), interrupt_grace_s=0.5)
    change = cells.ContextChange(1, alive=False, at=(3, 4), reply=1, value={"a": 1})
    stream = shown + ends[0]
    frames = wire.encode_numbered(
        Kind.EVENT, 1, 0, wire_values.encode_started(Started(2), ISOLATION)
    )
    for fd, data in ((wire.MESSAGES, stream), (1, b"ab"), (2, b"c")):
        frames += wire.encode_output_head(1, fd, 0, len(data)) + data
        frames += wire.encode_end_of_output(1, fd, len(data))
    end = wire_values.encode_event(Exited(0, "", Usage()))
    frames += wire.encode_numbered(Kind.EVENT, 1, 1, end)
    return [
        b"f" + frames,
        *(b"m" + shown + end for end in ends),
        b"g" + wire.to_json(cells.encode_change(change)["context"]),
        b"o" + cells.encode_context(context),
        *(b"c" + cells.encode_cell(spec, SESSION, context=1, number=2) for spec in specs),
    ]


def _helper_replies() -> list[bytes]:
    """What the helper for file calls sends."""
    info = ["name", 0o100644, 4, 1700000000.5]
    messages: list[tuple[dict[str, object], bytes]] = [
        ({"id": 1, "end": True}, b"data"),
        ({"id": 2, "errno": 2, "why": "No such file or directory"}, b""),
        ({"id": 3, "info": info, "end": True}, b""),
        ({"id": 4, "items": [info, ["d", 0o40755, 4096, 1]], "end": True}, b""),
        ({"id": 5, "items": ["a.py", "/etc/passwd"]}, b""),
        ({"id": 6, "items": [["f", "created"], ["", "overflow"]]}, b""),
        ({"id": 7, "size": 12, "end": True}, b""),
    ]
    found = [inside_frames.encode(head, body) for head, body in messages]
    return [b"\xff" + b"".join(found), *(b"\x03" + message for message in found)]


def _reports() -> list[bytes]:
    ready, started = (SIMPLE.pack(kind, 0, 2, 0) for kind in (Message.READY, Message.STARTED))
    exited = EXITED.pack(Message.EXITED, 256, 10, 20, 30)
    failed = SIMPLE.pack(Message.FAILED, FailurePlace.EXEC, 2, 0)
    wrapped = SIMPLE.pack(Message.FAILED, p.Wrap.op, 0, 0) + b"bwrap: no\n"
    terminal = SIMPLE.pack(Message.TERMINAL, 0, 0, 0)
    return [
        NEXT_MESSAGE.join((b"\2" + ready, b"\0" + started, b"\0" + exited)),
        b"\0" + failed,
        b"\1" + wrapped,
        b"\2" + terminal,
    ]


def _mediated() -> list[bytes]:
    """Calls by number (doubled, as the target reads it) and what their arguments point to."""
    arguments = struct.pack("=6Q", 3, 0x1000, 16, 0, 0, 0)
    return [
        *(struct.pack("=i", number * 2) + arguments for number in (42, 62, 90, 91, 268, 280, 452)),
        struct.pack("=HH4s8x", 2, 80, bytes((127, 0, 0, 1))),
        struct.pack("=HHI16sI", 10, 80, 0, bytes(15) + b"\1", 0),
        struct.pack("=H", 1) + b"/srv/own.sock",
        struct.pack("=H", 1) + b"\0abstract",
        struct.pack("=4q", 1, 2, 3, 4),
        b"/srv/a",
        b"/tmp/s",
    ]


_GREETINGS: Final[tuple[tuple[bytes, ...], ...]] = (
    (b'{"protocol":1,"session":"one","token":"open sesame"}', b"", b"frames"),
    (b'{"protocol":1,"session":"two","token":"open sesame"}',),
    (b'{"protocol":2,"session":"one","token":""}', b'{"protocol":1,"session":1,"token":null}'),
    (b"[]", b"", b'{"protocol":1,"session":"one","token":"\\ud800"}'),
)


def _on_a_line(*messages: bytes) -> bytes:
    return b"".join(len(one).to_bytes(4, "big") + one for one in messages)


def _http_entries() -> list[bytes]:
    value = {"value": "sk-0123456789abcdef", "placeholder": "sk-ABCDEFGHIJKLMNOP"}
    entry = {"id": "a" * 32, "host": "allowed.test", "allow": ["GET /v1/**"], "max_requests": 3}
    auths: list[dict[str, Any]] = [
        {"kind": "bearer", "secret": "b" * 32},
        {"kind": "header", "name": "x-api-key", "prefix": "", "secret": "b" * 32},
        {"kind": "basic", "username": "me", "secret": "b" * 32},
        {"kind": "query", "name": "key", "secret": "b" * 32},
        {"kind": "sigv4", "access_key": "AK", "secret": "b" * 32, "session_token": "b" * 32},
        {"kind": "server", "name": "stored"},
    ]
    return [
        wire.to_json({"network_allowlist": ["a.test", {**entry, "auth": auth}],
                      "secrets": {"b" * 32: value}, "network_mode": "allowlist"})
        for auth in auths
    ]  # fmt: skip


def seeds() -> dict[str, list[bytes]]:
    """The inputs to begin with, by target."""
    frames = _frames()
    name = b"\x03\x0callowed.test"
    greeting = b"\5\1\0\5\1\0"
    return {
        "native_plan": _plans(),
        "native_exec_request": _execs(),
        "native_message": _messages(),
        "native_netlink": _netlink(),
        "native_mediated": _mediated(),
        "hosts": [
            b"example.com\nEXAMPLE.com.\nevil.example.com",
            b"*.example.com:443\na.example.com\nexample.com",
            b"192.0.2.0/24\n192.0.2.9\n0xc0.0.2.9\n3221225993",
            b"[2001:db8::1]:443\n2001:db8::1\n[2001:DB8:0::1]",
            "b\u00fccher.test\nB\u00dcCHER.test\nxn--bcher-kva.test".encode(),
            "a\u3002b\uff0ec\nfa\u00df.de".encode(),
        ],
        "addresses": [b"127.0.0.1", b"0x7f.1", b"017700000001", b"2130706433", b"::ffff:1.2.3.4"],
        "http": [*_http(), b"allowed.test:443", b"[::1]:80"],
        "http_requests": [
            b"GET /v1/x HTTP/1.1\r\nHost: allowed.test\r\nCookie: a\r\n\r\n" * 2,
            b"POST /v1/x?a=b HTTP/1.1\r\nHost: allowed.test\r\nContent-Length: 2\r\n\r\nok",
            b"POST /v1/x HTTP/1.1\r\nhost: allowed.test\r\ntransfer-encoding: chunked\r\n\r\n0\r\n",
            b"GET /v1/%2e%2e/x HTTP/1.1\r\nHost: allowed.test\r\nAuthorization: a\r\n\r\n",
        ],
        "http_responses": [
            b"HTTP/1.1 200 OK\r\nx: <TOKEN>\r\ncontent-length: 7\r\n\r\n<TOKEN>",
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n7\r\n<TOKEN>\r\n0\r\n\r\n",
            b"HTTP/1.1 204 <TOKEN>\r\n\r\nHTTP/1.0 200 OK\r\n\r\n<TOKEN><TOKEN>",
        ],
        "http_entries": _http_entries(),
        "http_scrubbing": [b"\x03before <TOKEN> after", b"\x00<TOKEN>", b"\x28sk-<TOKEN>sk-proj"],
        "chunked": [
            b"\1" + b"3\r\nabcXY0\r\n\r\n",
            b"\1" + b"3;x=y\r\nabc\r\n0\r\nT: u\r\n\r\nrest",
            b"\4A\r\n0123456789\r\n0\r\n\r\n",
        ],
        "http_proxy": _http_proxy(),
        "socks": [
            b"\0" + greeting + name + b"\1\xbb",
            b"\0" + greeting + b"\1\xc0\0\2\1\0\x50",
            b"\0" + greeting + b"\4" + bytes(10) + b"\xff\xff\xc0\0\2\1\0\x50",
            b"\1\5\1\2\1\2me\6secret\5\1\0" + name + b"\0\x50",
        ],
        "dns": [
            _query("allowed.test", 1),
            _query("A.Wild.test", 28, edns=True),
            _query("other.test", 255, edns=True),
            _query("1.0.18.198.in-addr.arpa", 12),
            _query("localhost", 28),
        ],
        "tls": [
            b"\x40" + _hello("allowed.test").replace(b"\0\x0callowed", b"\0\x7fallowed"),
            b"\x40" + _hello("allowed.test"),
            b"\x05" + _hello(None),
            b"\xff" + _hello("a.test"),
        ],
        "paths": [
            b"a/b",
            b"/tmp/work/d",
            b"../x",
            b"d/up/f",
            b"./d//e/./f",
            b"/a/b/c/d",
            b"\xff/\xc3",
        ],
        "endpoint": [
            b"http://127.0.0.1:8080/base/",
            b"https://example.com#sha256=" + b"ab" * 32,
            b"unix:///run/sandbox.sock",
            b"http://[::1]:80",
            b"socks5h://me:secret@proxy.test:1080",
            b"sha256:" + b"0" * 64,
        ],
        "sizes": [b"512Mi", b"1.5", b"500m", b"1e3", b"99999999999999999999", b"nan", b"7Ti"],
        "wire_values": _values()["values"],
        "wire_client": frames["client"],
        "wire_server": frames["server"],
        "line": [_on_a_line(*greeting) for greeting in _GREETINGS],
        "replay": [bytes((0, 9, 1, 255, 2, 128, 3, 255, 1, 9)), bytes((0, 255, 4, 1, 5, 0)) * 3],
        "sandbox_messages": _reports(),
        "driver_frames": _driver_frames(),
        "cells": _cells(),
        "file_helper": _helper_replies(),
    }


def write(name: str, folder: Path) -> None:
    """Put the seeds of one target into ``folder``."""
    archives.unpack(seeds()[name], folder)
