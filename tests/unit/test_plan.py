"""The wire format of plans, read back by a second, independent reader."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from union.sandbox._plan import layers, template
from union.sandbox._plan import plan as p
from union.sandbox._plan.rootfs import (
    RUN_DIR,
    NetworkFile,
    Shown,
    View,
    can_share,
    landlock_steps,
    of_network,
    own_steps,
    shared_steps,
)

CLASSES = [value for value in vars(p).values() if isinstance(value, type)]
STEPS = [
    *(value for value in CLASSES if issubclass(value, p.Step) and value.op),
    template.Template,
    layers.Layers,
    layers.Attach,
    layers.Tree,
]


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
        (p.LandlockPath("/w", 5, identity=(8, 9)), (16, (5, 8, 9, 0), b"/w\0", b"")),
        (p.Terminal(), (40, (0, 0, 0, 0), b"", b"")),
        (p.Confine(), (41, (0, 0, 0, 0), b"", b"")),
        (p.Unprivileged(), (42, (0, 0, 0, 0), b"", b"")),
        (p.Nice(5), (43, (5, 0, 0, 0), b"", b"")),
        (
            p.Mediate(b"\1" * 8, ("/w", "/t"), connect=True),
            (44, (1, 0, 0, 0), b"\1" * 8, b"/w\0/t\0"),
        ),
        (
            layers.Layers((("lowerdir+", "/a"), ("volatile", ""))),
            (32, (6, 0, 0, 0), b"lowerdir+\0/a\0volatile\0\0", b"overlay\0"),
        ),
        (layers.Attach("/w"), (33, (0, 0, 0, 0), b"/w\0", b"")),
        (layers.Attach("/w", fd=1), (33, (2, 0, 0, 0), b"/w\0", b"")),
        (layers.Tree("/w"), (34, (0, 0, 0, 0), b"/w\0", b"")),
        (template.Template(("/p", "a"), ("A=1",)), (48, (0, 0, 0, 0), b"/p\0a\0", b"A=1\0")),
    ],
)  # fmt: skip
def test_each_step_on_the_wire(step, wanted):
    assert encoded(step) == [wanted]


def test_every_step_has_a_number_and_a_name():
    numbers = [step.op for step in STEPS]
    assert sorted(numbers) == sorted(set(numbers))
    assert set(numbers) == set(p.OP_NAMES)
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
        "pivot": True,
        "tmp_bytes": 1,
        "shm_bytes": 2,
        **changes,
    }
    return View(**fields)


def index(steps: list[p.Step], kind: type, path: str) -> int:
    return next(n for n, s in enumerate(steps) if isinstance(s, kind) and s.path == path)


def test_the_order_of_mounts_is_the_policy():
    steps = [*shared_steps(view()), *own_steps(view())]
    assert isinstance(steps[0], p.Root)
    assert steps[1] == p.Enter(move=False)
    tmp = index(steps, p.Tmpfs, "/tmp")
    work = index(steps, p.Bind, "/tmp/deep/work")
    assert tmp < index(steps, p.Mkdir, "/tmp/deep") < work, "what is below /tmp sits on top of it"
    detach = next(n for n, s in enumerate(steps) if isinstance(s, p.Detach))
    assert index(steps, p.Proc, "/proc") < detach < work
    made = [s.path for s in steps if isinstance(s, p.Mkdir)]
    assert len(made) == len(set(made))


def test_mounts_below_a_sandboxs_own_directories_are_kept_for_it():
    assert can_share(view())
    shared, own = shared_steps(view(), hold=True), own_steps(view(), held=True)
    (held,) = [s for s in shared if isinstance(s, p.Bind) and s.source == "/w"]
    (shown,) = [s for s in own if isinstance(s, p.Bind)]
    assert (shown.source, shown.path) == (held.path, "/tmp/deep/work")
    assert held.attrs == shown.attrs == p.NOSUID | p.NODEV
    assert index(own, p.Tmpfs, held.path.rpartition("/")[0]), (
        "the place where it was held is covered"
    )


NETWORK_FILES = (
    NetworkFile(network="filtered", path="/etc/resolv.conf", content=b"nameserver 127.0.0.53\n"),
    NetworkFile(network="open", path="/etc/resolv.conf", source="/run/resolve/stub"),
)


def test_files_of_a_network_are_held_and_then_mounted_over_the_common_ones():
    seen = view(files=(("/etc/resolv.conf", b""),), network_files=NETWORK_FILES)
    shared = shared_steps(seen, hold=True)
    assert p.File("/etc/resolv.conf", b"") in shared
    filtered, opened = (file.held_at for file in NETWORK_FILES)
    assert p.File(filtered, b"nameserver 127.0.0.53\n") in shared
    assert shared[index(shared, p.Bind, opened)].attrs == p.RDONLY | p.NOSUID | p.NODEV
    for network, wanted in (("blocked", []), ("filtered", [filtered]), ("open", [opened])):
        own = own_steps(seen, held=True, network=network)
        covers = [s for s in own if isinstance(s, p.Cover)]
        assert covers == [p.Cover("/etc/resolv.conf", held) for held in wanted]
        assert own[: len(covers)] == covers, "before a tmpfs covers the place where they are held"
        assert all(held.startswith(f"{RUN_DIR}/") for held in wanted)
        assert index(own, p.Tmpfs, RUN_DIR)


def test_a_sandbox_that_shares_nothing_has_only_the_files_of_its_network():
    seen = view(files=(("/etc/resolv.conf", b""), ("/etc/hosts", b"")), network_files=NETWORK_FILES)
    assert of_network(seen, "blocked").files == seen.files
    filtered = of_network(seen, "filtered")
    assert dict(filtered.files) == {"/etc/hosts": b"", "/etc/resolv.conf": NETWORK_FILES[0].content}
    opened = shared_steps(of_network(seen, "open"))
    assert opened[index(opened, p.Bind, "/etc/resolv.conf")].source == "/run/resolve/stub"
    assert not [s for s in opened if isinstance(s, p.File) and s.path == "/etc/resolv.conf"]
    for one in (filtered, of_network(seen, "open")):
        assert not [s for s in own_steps(one) if isinstance(s, p.Cover)]


def test_no_mount_point_is_created_in_a_directory_of_the_caller():
    inner = Shown(source="/srv/w/sub/file", path="/srv/w/sub/file", is_dir=False)
    for is_private in (False, True):
        work = Shown(source="/srv/w", path="/srv/w", writable=True, is_private=is_private)
        steps = shared_steps(view(added=(inner, work)))
        outer, nested = (steps[index(steps, p.Bind, s.path)] for s in (work, inner))
        assert not outer.existing, "it is created in the private root"
        assert nested.existing is not is_private
    read_only = Shown(source="/srv/w", path="/srv/w")
    steps = shared_steps(view(added=(inner, read_only)))
    assert not steps[index(steps, p.Bind, inner.path)].existing, "nothing can be created there"


def test_a_view_is_shared_unless_parts_of_proc_are_guarded():
    plain = (Shown(source="/w", path="/var/work", writable=True),)
    assert can_share(view(added=plain))
    assert not can_share(view(added=plain, guarded_proc=("/proc/sys",)))
    assert not any(isinstance(s, p.Bind) for s in own_steps(view(added=plain)))
    shared = shared_steps(view(added=plain))
    assert isinstance(shared[-1], p.Remount), "nothing is added to the root after that"
    assert not any(isinstance(s, p.Tmpfs | p.Slot) for s in shared), "nothing writable is shared"


def test_a_moved_root_has_nothing_to_detach():
    steps = shared_steps(view(pivot=False))
    assert steps[1] == p.Enter(move=True)
    assert p.Detach() not in steps


def test_only_writable_paths_are_mounted_writable():
    every = (*shared_steps(view()), *own_steps(view()))
    steps = {s.path: s for s in every if isinstance(s, p.Bind)}
    assert not steps["/tmp/deep/work"].attrs & p.RDONLY
    for path in ("/usr", "/opt/py"):
        assert steps[path].attrs == p.RDONLY | p.NOSUID | p.NODEV


@pytest.mark.threat(164)
def test_landlock_keeps_the_path_sockets_of_other_runs_out_of_reach():
    """Where the kernel can (ABI 9): only those in read-only paths, which no run can make."""
    resolve_unix = 1 << 16
    for abi in (8, 9, 10):
        steps = landlock_steps(view(), abi=abi)
        (create,) = [s for s in steps if isinstance(s, p.LandlockCreate)]
        allowed = {s.path for s in steps if isinstance(s, p.LandlockPath) and s.access >> 16 & 1}
        assert bool(create.handled_fs & resolve_unix) == (abi >= 9)
        assert allowed == ({"/opt/py"} if abi >= 9 else set())


def test_landlock_allows_writing_only_to_listed_paths():
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


WORK = "/srv/u/deep/work"


@pytest.mark.parametrize(
    "work, beside, rule",
    [
        (WORK, (), "/srv/u/deep"),
        (WORK, ((f"{WORK}/inner", False),), "/srv/u/deep"),
        (WORK, (("/srv/u/other", False),), "/srv/u/deep"),
        (WORK, (("/srv/u/deep/data", False),), WORK),
        (WORK, (("/srv/u/deep/data/more", False),), WORK),
        (WORK, (("/srv/u/deep", False),), WORK),
        (WORK, (("/srv/u", True),), WORK),
        ("/work", (), "/work"),
        ("/tmp/deep/work", (), "/tmp/deep/work"),
        ("/run/work", (), "/run/work"),
        ("/run/sandbox/work", (), "/run/sandbox/work"),
        ("/etc/work", (), "/etc/work"),
        ("/usr/work", (), "/usr/work"),
        ("/var/tmp/work", (), "/var/tmp"),
    ],
)
def test_the_rule_of_the_work_dir_is_on_the_directory_above_if_that_holds_nothing_else(
    work, beside, rule
):
    """So that it applies to what is mounted over the work dir later."""
    shown = (
        Shown(source="/w", path=work, writable=True),
        *(Shown(source=path, path=path, writable=writable) for path, writable in beside),
    )
    steps = landlock_steps(view(added=shown, work_dir=work), abi=5)
    write_file = 2
    usual = {"/dev", "/dev/shm", "/tmp"} | {path for path, writable in beside if writable}
    found = {s.path for s in steps if isinstance(s, p.LandlockPath) and s.access & write_file}
    assert found == usual | {rule}


def test_terminals_exist_only_on_request():
    assert not [s for s in own_steps(view()) if isinstance(s, p.Devpts)]
    (pts,) = [s for s in own_steps(view(terminals=True)) if isinstance(s, p.Devpts)]
    assert "newinstance" in pts.options.split(",")
    # The shared part is the same with and without terminals.
    assert shared_steps(view()) == shared_steps(view(terminals=True))
    assert p.Mkdir(pts.path) in shared_steps(view())
