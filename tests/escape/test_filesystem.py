"""Attacks on files of the host: descriptors, links, metadata, devices, shared places."""

# ruff: noqa: E501 - an attack program keeps each try on one line
from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.conftest import interpreter_under, session_of
from tests.escape.inside import attack, outside, program
from tests.escape.plants import SECRET, drive, snapshot

from union import sandbox as sb
from union.sandbox._linux.launcher import BINARY
from union.sandbox._plan.rootfs import HELD_DIR

if TYPE_CHECKING:
    from tests.conftest import OpenSession

pytestmark = pytest.mark.spec("G2", "E4")

_FIND_DESCRIPTORS = """
found = []
for fd in range(1024):
    try:
        os.fstat(fd)
        found.append(fd)
    except OSError:
        pass
out["open"] = found
out["used"] = {}
for fd in given["fds"]:
    out["used"][str(fd)] = [
        attempt(os.read, fd, 1), attempt(os.write, fd, b"x"), attempt(os.listdir, fd),
        attempt(os.open, "etc/shadow", os.O_RDONLY, dir_fd=fd), attempt(os.fchdir, fd)]
"""


@pytest.mark.threat(1)
@pytest.mark.spec("G2")
def test_descriptors_left_inheritable_do_not_reach_the_command(cell: str, plant: Path) -> None:
    """The owner holds a file, `/` and a pipe open, inheritable, before it starts."""
    fds = [os.open(plant / "secret", os.O_RDWR), os.open("/", os.O_RDONLY), *os.pipe()]
    try:
        code = program(_FIND_DESCRIPTORS, given={"fds": fds})
        body = """
        fds = json.loads(sys.argv[1])
        for fd in fds:
            os.fstat(fd)  # the plant is there
            os.set_inheritable(fd, True)
        async with session() as sbx:
            print(await sbx.run_code(sys.argv[2]))
        """
        text = drive(cell, body, args=[json.dumps(fds), code], pass_fds=fds)
    finally:
        for fd in fds:
            os.close(fd)
    found = json.loads(text.strip().splitlines()[-1])
    assert found["open"] == [0, 1, 2]
    assert all(set(tries) == {"EBADF"} for tries in found["used"].values()), found


@pytest.mark.threat(2)
async def test_a_cwd_that_leads_out_is_not_entered(
    jailed: OpenSession, plant: Path, work: str
) -> None:
    """By `..`, by an absolute path, by links, through /proc."""
    (Path(work) / "out").symlink_to(plant)
    (Path(work) / "sub").mkdir()
    async with jailed(host_work_dir=work) as jail:
        places = (
            "..", "../plant", "sub/../../plant", str(plant), f"{work}/../plant", "out", "out/inner",
            "/proc/self/cwd/../plant", "/proc/1/root" + str(plant), "/proc/1/cwd", "/dev/fd/3",
        )  # fmt: skip
        for cwd in places:
            try:
                result = await jail.exec("cat secret deep 2>&1; ls 2>&1", cwd=cwd)
            except sb.SandboxError:
                continue
            assert SECRET not in result.stdout, cwd
            assert "secret" not in result.stdout.split(), cwd
        assert (await jail.exec("pwd", cwd="sub")).stdout == f"{work}/sub\n"


@pytest.mark.threat(3)
async def test_no_program_file_opens_for_writing_through_exe(jail: sb.Session) -> None:
    """The launcher and the interpreter, by /proc/<pid>/exe and by their paths."""
    before = hashlib.sha256(BINARY.read_bytes()).hexdigest()
    code = """
    pids = [entry for entry in os.listdir("/proc") if entry.isdigit()]
    paths = [f"/proc/{pid}/exe" for pid in [*pids, "self"]] + given["paths"]
    for path in paths:
        for flags in (os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_APPEND):
            out[f"{path} {flags}"] = attempt(os.open, path, flags)
    write("control", "x")
    """
    paths = [str(BINARY), os.path.realpath("/proc/self/exe"), "/run/tools/uv", "/bin/sh"]
    found = await attack(jail, code, given={"paths": paths})
    assert "ok" not in found.values(), found
    assert hashlib.sha256(BINARY.read_bytes()).hexdigest() == before
    assert await jail.get_bytes("control") == b"x"


@pytest.mark.threat(10)
async def test_a_host_file_cannot_be_hard_linked_or_moved_into_the_work_dir(
    jailed: OpenSession, plant: Path, work: str
) -> None:
    """Hidden from the sandbox, and shown to it read-only."""
    code = """
    for name, source in given["sources"].items():
        out[name] = [attempt(os.link, source, f"{name}.link"),
                     attempt(os.link, source, f"{name}.link", follow_symlinks=True),
                     attempt(os.rename, source, f"{name}.moved"),
                     attempt(os.rename, "own", source)]
    write("own")
    out["control"] = attempt(os.link, "own", "own.link")
    """
    before = snapshot(plant)
    sources = {"file": str(plant / "secret"), "deep": str(plant / "inner" / "deep")}
    for shown in ((), (str(plant),)):
        async with jailed(host_work_dir=work, read_only_paths=shown) as jail:
            found = await attack(jail, code, given={"sources": sources})
            assert found.pop("control") == "ok"
            assert all("ok" not in tries for tries in found.values()), found
        assert snapshot(plant) == before
        for name in ("own", "own.link"):
            Path(work, name).unlink()
    os.link(plant / "secret", Path(work) / "by-the-host")  # one file system: the host can


@pytest.mark.threat(11)
async def test_links_out_of_the_work_dir_lead_nowhere(
    jailed: OpenSession, plant: Path, work: str
) -> None:
    """Links made by either side, and magic links of /proc."""
    (Path(work) / "by-host").symlink_to(plant)
    (Path(work) / "near").write_text("near")
    code = """
    plant = given["plant"]
    os.symlink(plant, "by-sandbox")
    os.symlink("../plant", "relative")
    os.symlink("/", "root")
    os.symlink("near", "control")
    ways = ["by-host", "by-sandbox", "relative", "root" + plant, "/proc/self/root" + plant,
            "/proc/1/root" + plant, "/proc/self/cwd/../plant", "/proc/thread-self/cwd/../plant"]
    for way in ways:
        out[way] = [attempt(read, way + "/secret"), attempt(os.listdir, way),
                    attempt(write, way + "/new"), attempt(write, way + "/secret"),
                    attempt(os.unlink, way + "/secret"), attempt(os.stat, way + "/secret")]
    out["control"] = read("control")
    """
    before = snapshot(plant)
    async with jailed(host_work_dir=work) as jail:
        found = await attack(jail, code, given={"plant": str(plant)})
    assert found.pop("control") == "near"
    assert all("ok" not in tries for tries in found.values()), found
    assert snapshot(plant) == before


@pytest.mark.threat(18)
async def test_no_set_id_file_can_be_made(jailed: OpenSession, work: str) -> None:
    """By every call that takes a mode; the work dir may belong to the host's root."""
    code = """
    write("file", "#!/bin/sh\\n")
    os.mkdir("dir")
    fd = os.open("file", os.O_RDWR)
    for mode in (0o4755, 0o2755, 0o6777, 0o4000):
        out[oct(mode)] = [
            attempt(os.chmod, "file", mode), attempt(os.fchmod, fd, mode),
            attempt(os.chmod, "dir", mode & ~0o4000 | 0o2000),
            call("fchmodat2", -100, b"file", mode, 0),
            attempt(os.open, f"made-{mode}", os.O_CREAT | os.O_WRONLY, mode),
            attempt(os.mkdir, f"dir-{mode}", mode & ~0o4000 | 0o2000),
            attempt(os.mknod, f"node-{mode}", stat.S_IFREG | mode),
            call("openat2", -100, b"by-openat2", struct.pack("QQQ", 0o101, mode, 0), 24),
            attempt(os.setxattr, "file", "security.capability", struct.pack("<5I", 0x2000001, 1, 0, 0, 0)),
        ]
    out["control"] = attempt(os.chmod, "file", 0o755)
    """
    async with jailed(host_work_dir=work) as jail:
        found = await attack(jail, code)
        with pytest.raises((sb.SandboxError, OSError)):
            await jail.put_bytes("put", b"", mode=0o4755)
        assert found.pop("control") == "ok"
        assert all("ok" not in tries for tries in found.values()), found
        for path in Path(work).rglob("*"):
            assert not path.lstat().st_mode & 0o6000, path
    file = Path(work) / "file"
    assert stat.S_IMODE(file.stat().st_mode) == 0o755
    file.chmod(0o4755)  # the host may, on this very file
    assert file.stat().st_mode & stat.S_ISUID


_METADATA = """
path = given["path"]
blob = ctypes.create_string_buffer(256)
out["tries"] = {
    "stat": attempt(os.stat, path), "lstat": attempt(os.lstat, path),
    "access": "ok" if os.access(path, os.F_OK) else "ENOENT",
    "statx": call(given["statx"], -100, path.encode(), 0, 0xfff, blob),
    "chmod": attempt(os.chmod, path, 0o600), "chown": attempt(os.chown, path, os.getuid(), os.getgid()),
    "lchown": attempt(os.lchown, path, -1, -1), "utime": attempt(os.utime, path, (1, 1)),
    "setxattr": attempt(os.setxattr, path, "user.x", b"x"),
    "listxattr": attempt(os.listxattr, path), "truncate": attempt(os.truncate, path, 0),
    "trunc": attempt(os.open, path, os.O_RDONLY | os.O_TRUNC),
    "path": attempt(os.open, path, os.O_PATH), "read": attempt(read, path),
    "unlink": attempt(os.unlink, path), "rename": attempt(os.rename, path, path + "2"),
    "symlink": attempt(os.symlink, "x", path + "3"), "statvfs": attempt(os.statvfs, path),
}
write("own")
out["control"] = [attempt(os.chmod, "own", 0o600), attempt(os.utime, "own", (1, 1)),
                  attempt(os.truncate, "own", 0), attempt(os.stat, "own"), attempt(os.open, "own", os.O_PATH)]
"""


@pytest.mark.threat(7, 19, 20)
async def test_metadata_verbs_do_not_reach_a_host_file(jail: sb.Session, plant: Path) -> None:
    """A world-writable plant: no call changes it or reveals its existence."""
    before = snapshot(plant)
    statx = 332 if os.uname().machine == "x86_64" else 291
    given = {"path": str(plant / "secret"), "statx": statx}
    found = await attack(jail, _METADATA, given=given)
    assert set(found["control"]) == {"ok"}
    assert set(found["tries"].values()) == {"ENOENT"}, found
    assert snapshot(plant) == before
    missing = await attack(jail, _METADATA, given=given | {"path": str(plant / "not-there")})
    assert missing["tries"] == found["tries"], "the results reveal whether the file exists"
    bare = await outside(_METADATA.replace("write(", "(lambda *a: 0)("), given=given)
    assert bare["tries"]["stat"] == bare["tries"]["chmod"] == bare["tries"]["truncate"] == "ok"


@pytest.mark.threat(7, 19, 24)
async def test_nodes_of_dev_keep_their_metadata(jail: sb.Session) -> None:
    """Even a change to the present value must be refused."""
    code = """
    for name in ("null", "zero", "full", "random", "urandom", "tty"):
        path = "/dev/" + name
        mode = stat.S_IMODE(os.stat(path).st_mode)
        out[name] = [attempt(os.chmod, path, mode), attempt(os.utime, path, ns=(
            os.stat(path).st_atime_ns, os.stat(path).st_mtime_ns))]
    write("own")
    out["control"] = [attempt(os.chmod, "own", 0o644), attempt(os.utime, "own", (1, 1))]
    """
    found = await attack(jail, code)
    assert found.pop("control") == ["ok", "ok"]
    assert all("ok" not in tries for tries in found.values()), found


@pytest.mark.threat(21)
async def test_watches_reveal_nothing_about_host_directories(
    jailed: OpenSession, plant: Path, work: str
) -> None:
    """inotify and fanotify, while the host writes."""
    code = """
    fd = libc.inotify_init1(os.O_NONBLOCK)
    def watch(path):
        ctypes.set_errno(0)
        found = libc.inotify_add_watch(fd, path.encode(), 0xfff)
        return "ok" if found >= 0 else errno.errorcode[ctypes.get_errno()]
    out["plant"] = watch(given["plant"])
    out["parent"] = watch(os.path.dirname(given["plant"]))
    out["tmp"] = watch("/tmp")
    out["fanotify"] = call("fanotify_init", 0, 0)
    out["work"] = watch(".")
    print("watching", flush=True)
    sys.stdin.readline()
    time.sleep(0.1)
    names = []
    try:
        data = os.read(fd, 65536)
    except BlockingIOError:
        data = b""
    while data:
        size = struct.unpack_from("iIII", data)[3]
        names.append(data[16:16 + size].rstrip(b"\\0").decode())
        data = data[16 + size:]
    out["names"] = names
    """
    mark = f"sbx-watch-{secrets.token_hex(4)}"
    async with jailed(host_work_dir=work) as jail:
        proc = await jail.run(
            program(code, given={"plant": str(plant)}),
            script_type="python",
            stdin=True,
            stdout=True,
            timeout_s=20,
        )
        lines = proc.iter_stdout_lines()
        assert await anext(lines) == "watching"
        (plant / mark).write_text("x")
        in_tmp = Path("/tmp", mark)
        in_tmp.write_text("x")
        (Path(work) / "control").write_text("x")
        in_tmp.unlink()
        assert proc.stdin is not None
        proc.stdin.write(b"\n")
        proc.stdin.close()
        found = json.loads([line async for line in lines][-1])
    assert (found["plant"], found["fanotify"]) == ("ENOENT", "EPERM")
    assert found["tmp"] == found["work"] == "ok"
    assert "control" in found["names"]
    assert mark not in found["names"], found


@pytest.mark.threat(22)
@pytest.mark.spec("B4", "B8")
async def test_tmp_and_shm_are_fresh_and_separate(jailed: OpenSession) -> None:
    """Plants are invisible both ways, and nothing survives to the next run."""
    mark = f"sbx-mark-{secrets.token_hex(4)}"
    places = ["/tmp", "/dev/shm"]
    for place in places:
        Path(place, mark).write_text("host")
    try:
        async with jailed() as jail, jailed() as other:
            code = """
            for place in given["places"]:
                out[place] = os.listdir(place)
                write(f"{place}/{given['mark']}-inside", "x")
                out[place + " control"] = read(f"{place}/{given['mark']}-inside")
            """
            given = {"places": places, "mark": mark}
            for session in (jail, jail, other):
                found = await attack(session, code, given=given)
                own = os.path.basename(session.work_dir)  # where there is no /var/tmp, it is here
                for place in places:
                    assert set(found[place]) <= {own} | interpreter_under(place)
                assert [found[f"{p} control"] for p in places] == ["x", "x"]
            for place in places:
                assert Path(place, mark).read_text() == "host"
                assert not Path(place, f"{mark}-inside").exists()
    finally:
        for place in places:
            Path(place, mark).unlink()


@pytest.mark.threat(23)
async def test_private_files_of_etc_are_not_there(jail: sb.Session) -> None:
    """No accounts, no keys; every file of /etc that is readable inside is world-readable."""
    shown = Path("/etc/terminfo") if os.path.isdir("/etc/terminfo") else Path("/etc/alternatives")
    closed = shown / f"sbx-plant-{secrets.token_hex(4)}"
    planted = os.geteuid() == 0 and os.access(shown, os.W_OK)
    if planted:
        closed.touch(0o600)
        closed.write_text(SECRET)
    try:
        code = """
        for name in given["absent"]:
            out[name] = attempt(os.lstat, name)
        opened = []
        for top, _, names in os.walk("/etc"):
            for name in names:
                path = os.path.join(top, name)
                if attempt(read, path) == "ok":
                    opened.append(path)
        out["opened"] = opened
        out["closed"] = [attempt(os.stat, given["closed"]), attempt(read, given["closed"])]
        """
        absent = ["/etc/shadow", "/etc/gshadow", "/etc/sudoers", "/etc/ssh", "/etc/machine-id",
                  "/etc/hostname", "/etc/ssl/private", "/root/.ssh", "/sys", "/boot"]  # fmt: skip
        found = await attack(jail, code, given={"absent": absent, "closed": str(closed)})
    finally:
        if planted:
            closed.unlink()
    assert {found[name] for name in absent} == {"ENOENT"}
    assert found["closed"] == (["ok", "EACCES"] if planted else ["ENOENT", "ENOENT"])
    assert "/etc/passwd" in found["opened"]
    made = {"/etc/passwd", "/etc/group", "/etc/nsswitch.conf", "/etc/hosts", "/etc/resolv.conf"}
    for path in set(found["opened"]) - made:
        assert os.stat(path).st_mode & stat.S_IROTH, path


def _all_shown(sbx: sb.Session) -> list[str]:
    return [path for paths in sbx.fs_allowlist().values() for path in paths]


@pytest.mark.spec("B3", "B4")
async def test_the_staging_directory_of_a_work_dir_below_tmp_is_unreachable(cell: str) -> None:
    """The control is the same directory at its own path, with its own writes."""
    below = Path(tempfile.mkdtemp(dir="/tmp", prefix="held-"))
    try:
        (below / "marker").write_text(SECRET)
        async with session_of(cell, host_work_dir=str(below)) as sbx:
            # The interpreter may live below /tmp too, and is shown wherever it does.
            shown = {path.split("/")[2] for path in _all_shown(sbx) if path.startswith("/tmp/")}
            out = await attack(
                sbx,
                """
                out["own"] = attempt(read, given["own"] + "/marker")
                out["written"] = attempt(write, given["own"] + "/new")
                out["held"] = attempt(read, given["held"] + "/0/marker")
                out["planted"] = attempt(write, given["held"] + "/planted")
                out["other"] = sorted(os.listdir("/tmp"))
                """,
                given={"own": str(below), "held": HELD_DIR},
            )
        assert (out["own"], out["written"]) == ("ok", "ok")
        assert (below / "new").exists()
        assert out["held"] == "ENOENT"
        # The sandbox's own directory is there; only Landlock refuses to write to it.
        assert out["planted"] == ("EACCES" if sbx.isolation.landlock_abi else "ok")
        assert below.name in shown
        assert out["other"] == sorted(shown), "nothing else of the host's /tmp is there"
    finally:
        shutil.rmtree(below)
