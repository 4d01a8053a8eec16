"""The wire format of plans, read back by a second, independent reader."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from union.sandbox._core import plan as p
from union.sandbox._core.view import Shown, View, landlock_steps, mount_steps

CLASSES = [value for value in vars(p).values() if isinstance(value, type)]
STEPS = [value for value in CLASSES if issubclass(value, p.Step) and value.op]


def decode(data: bytes) -> list[tuple[int, tuple[int, ...], bytes, bytes]]:
    magic, count = struct.unpack_from("=II", data)
    assert magic == int.from_bytes(b"SBX2", "little")
    at, found = 8, []
    for _ in range(count):
        op, first, second, zero = struct.unpack_from("=4I", data, at)
        integers = struct.unpack_from("=4Q", data, at + 16)
        assert zero == 0
        at += 48
        blobs = []
        for size in (first, second):
            blobs.append(data[at : at + size])
            padded = -(-size // 8) * 8
            assert data[at + size : at + padded] == bytes(padded - size)
            at += padded
        found.append((op, integers, *blobs))
    assert at == len(data)
    return found


def encoded(*steps: p.Step) -> list[tuple[int, tuple[int, ...], bytes, bytes]]:
    return decode(p.Plan(steps=steps, clone_flags=0).encode())


def test_the_golden_bytes_of_a_small_plan():
    plan = p.Plan(steps=(p.Mkdir("/a"), p.Detach()), clone_flags=0)
    assert plan.encode().hex() == (
        "53425832" "02000000"
        "03000000" "03000000" "00000000" "00000000"
        "ed01000000000000" "0000000000000000" "0000000000000000" "0000000000000000"
        "2f61000000000000"
        "15000000" "00000000" "00000000" "00000000"
        "0000000000000000" "0000000000000000" "0000000000000000" "0000000000000000"
    )  # fmt: skip


@pytest.mark.parametrize(
    "step, wanted",
    [
        (p.Bind("/s", "/p"), (1, (7, 0, 0, 0), b"/s\0", b"/p\0")),
        (
            p.Bind("/s", "/p", 2, fd=0, idmap=2, identity=(5, 6)),
            (1, (2, 5, 6, 3 << 32 | 1), b"/s\0", b"/p\0"),
        ),
        (p.Root("/t", "size=1m"), (2, (0, 0, 0, 0), b"/t\0", b"size=1m\0")),
        (p.Mkdir("/d", 0o700), (3, (0o700, 0, 0, 0), b"/d\0", b"")),
        (p.File("/f", b"a\0b"), (4, (0o444, 0, 0, 0), b"/f\0", b"a\0b")),
        (p.Symlink("/l", "to"), (5, (0, 0, 0, 0), b"to\0", b"/l\0")),
        (
            p.Tmpfs("/tmp", 4096, 0o755, 9),
            (6, (6, 0, 0, 0), b"/tmp\0", b"mode=755,size=4096,nr_inodes=9\0"),
        ),
        (p.Proc("/proc"), (7, (0, 0, 0, 0), b"/proc\0", b"")),
        (p.Remount("/r", 1), (9, (1, 0, 0, 0), b"/r\0", b"")),
        (p.Hostname("h"), (10, (0, 0, 0, 0), b"h\0", b"")),
        (p.Netlink(0, b"msg", 2), (11, (0, 2, 0, 0), b"msg", b"")),
        (p.Listen(2, 1, b"addr", 5), (12, (2, 1, 5, 0), b"addr", b"")),
        (p.Slot("/run/x"), (13, (0o444, 0, 0, 0), b"/run/x\0", b"")),
        (p.Lockdown(), (14, (0xEF, 0, 0, 0), b"", b"")),
        (p.LandlockCreate(1, 2, 3, 24), (15, (1, 2, 3, 24), b"", b"")),
        (p.LandlockPath("/", 5), (16, (5, 0, 0, 0), b"/\0", b"")),
        (p.LandlockRestrict(), (17, (0, 0, 0, 0), b"", b"")),
        (p.Seccomp(b"\1" * 16), (18, (0, 0, 0, 0), b"\1" * 16, b"")),
        (p.Rlimit(7, 1, 2), (19, (7, 1, 2, 0), b"", b"")),
        (p.Subreaper(), (20, (0, 0, 0, 0), b"", b"")),
        (p.Detach(), (21, (0, 0, 0, 0), b"", b"")),
    ],
)  # fmt: skip
def test_each_step_on_the_wire(step, wanted):
    assert encoded(step) == [wanted]


def test_every_step_has_a_number_and_a_name():
    numbers = [step.op for step in STEPS]
    assert sorted(numbers) == sorted(set(numbers))
    assert set(numbers) <= set(p.OP_NAMES)
    assert len(set(p.OP_NAMES.values())) == len(p.OP_NAMES)


@given(
    st.lists(
        st.tuples(
            st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")),
            st.binary(max_size=40),
        )
    )
)
def test_any_plan_reads_back(items):
    steps = [p.File(path, content) for path, content in items]
    found = encoded(*steps)
    assert [(first, second) for _, _, first, second in found] == [
        (path.encode() + b"\0", content) for path, content in items
    ]


def test_names_that_are_not_utf8_keep_their_bytes():
    raw = b"/\xff\xfe".decode("utf-8", "surrogateescape")
    assert encoded(p.Mkdir(raw))[0][2] == b"/\xff\xfe\0"


def view(**changes: object) -> View:
    fields = {
        "system": (Shown(source="/usr", path="/usr"),),
        "links": (("/bin", "usr/bin"),),
        "files": (("/etc/passwd", b"x"),),
        "added": (
            Shown(source="/w", path="/tmp/deep/work", writable=True),
            Shown(source="/opt/py", path="/opt/py"),
        ),
        "fresh_proc": True,
        "guarded_proc": (),
        "staging": "/tmp",
        "tmp_bytes": 1,
        "shm_bytes": 2,
        **changes,
    }
    return View(**fields)


def index(steps: list[p.Step], kind: type, path: str) -> int:
    return next(n for n, s in enumerate(steps) if isinstance(s, kind) and s.path == path)


def test_the_order_of_mounts_is_the_policy():
    steps = mount_steps(view())
    assert isinstance(steps[0], p.Root)
    tmp = index(steps, p.Tmpfs, "/tmp")
    work = index(steps, p.Bind, "/tmp/deep/work")
    assert tmp < index(steps, p.Mkdir, "/tmp/deep") < work, "what is below /tmp sits on top of it"
    detach = next(n for n, s in enumerate(steps) if isinstance(s, p.Detach))
    assert index(steps, p.Proc, "/proc") < detach < work
    made = [s.path for s in steps if isinstance(s, p.Mkdir)]
    assert len(made) == len(set(made))


def test_only_what_is_writable_is_mounted_so():
    steps = {s.path: s for s in mount_steps(view()) if isinstance(s, p.Bind)}
    assert not steps["/tmp/deep/work"].attrs & p.RDONLY
    for path in ("/usr", "/opt/py"):
        assert steps[path].attrs == p.RDONLY | p.NOSUID | p.NODEV


def test_landlock_writes_only_where_said():
    assert landlock_steps(view(), abi=0) == []
    for abi in range(1, 8):
        steps = landlock_steps(view(), abi=abi)
        paths = {s.path: s.access for s in steps if isinstance(s, p.LandlockPath)}
        assert isinstance(steps[-1], p.LandlockRestrict)
        assert "/opt/py" not in paths
        write_file = 2
        assert not paths["/"] & write_file
        assert paths["/tmp/deep/work"] & write_file
        handled = steps[0].handled_fs
        assert all(access & ~handled == 0 for access in paths.values())
