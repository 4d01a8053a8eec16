"""Attacks on the private root that all sandboxes of a session share, whatever their network is."""

# ruff: noqa: E501 - an attack program keeps each try on one line
from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.conftest import eventually, session_of
from tests.escape.inside import attack
from tests.posture.inspection import namespace, sandboxes

from union.sandbox.on_device import _private_root, _probe

if TYPE_CHECKING:
    from tests.conftest import OpenSession

pytestmark = pytest.mark.spec("B3", "C7")

MODES: dict[str, dict[str, Any]] = {
    "blocked": {"network_mode": "blocked"},
    "filtered": {"network_mode": "allowlist", "network_allowlist": ["name.example"]},
    "open": {"network_mode": "open"},
}
_OWN_HOSTS = "127.0.0.1\tlocalhost sandbox\n::1\tlocalhost sandbox\n"
_FILES = """
for name in ("hosts", "resolv.conf"):
    out[name] = read("/etc/" + name)
"""
_TAMPER = """
os.chdir("/tmp")
write("/tmp/planted", "192.0.2.66 name.example")
os.symlink("/tmp/planted", "/tmp/link")
tries = {}
for name in ("hosts", "resolv.conf"):
    path = "/etc/" + name
    tries["write " + name] = attempt(write, path)
    tries["truncate " + name] = attempt(os.truncate, path, 0)
    tries["chmod " + name] = attempt(os.chmod, path, 0o666)
    tries["unlink " + name] = attempt(os.unlink, path)
    tries["rename " + name] = attempt(os.rename, "/tmp/planted", path)
    tries["exchange " + name] = call({"x86_64": 316, "aarch64": 276}[platform.machine()], -100, b"/tmp/planted", -100, path.encode(), 2)
    tries["link " + name] = attempt(os.link, "/tmp/planted", path)
    tries["bind " + name] = call("mount", b"/tmp/planted", path.encode(), None, 4096, None)
    tries["umount " + name] = call("umount2", path.encode(), 2)
    tries["through /proc " + name] = attempt(write, "/proc/self/root" + path)
    for network in ("filtered", "open"):
        held = f"/run/sandbox/{network}-{name}"
        tries["read " + held] = attempt(read, held)
        tries["write " + held] = attempt(write, held)
        tries["link " + held] = attempt(os.symlink, "/tmp/planted", held)
tries["umount"] = call("umount2", b"/run/sandbox", 2)
tries["rename"] = attempt(os.rename, "/run/sandbox", "/run/moved")
out["tries"] = tries
out["beside"] = attempt(write, "/tmp/fine")
"""


def _expected(mode: str) -> dict[str, str]:
    if mode == "open":
        host = {name: Path("/etc", name) for name in ("hosts", "resolv.conf")}
        own = {"hosts": _OWN_HOSTS, "resolv.conf": ""}
        return {
            name: path.read_text(errors="replace") if path.exists() else own[name]
            for name, path in host.items()
        }
    resolver = "nameserver 127.0.0.53\noptions timeout:5 attempts:1\n"
    return {"hosts": _OWN_HOSTS, "resolv.conf": resolver if mode == "filtered" else ""}


@pytest.fixture(params=["shared", "whole"])
def built(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, cell: str) -> str:
    """Whether sandboxes start from a shared root, or each is built completely."""
    if request.param == "whole":
        monkeypatch.setattr(_probe, "_known", {cell: _probe.HostFeatures(share=False)})
    return request.param


@pytest.mark.threat(98)
async def test_each_network_mode_has_its_own_name_files(jailed: OpenSession, built: str) -> None:
    """In every order of two modes, for shell commands, prepared Pythons and calls with limits."""
    async with jailed() as jail:
        for mode in itertools.chain(*itertools.permutations(MODES, 2)):
            found = await attack(jail, _FILES, **MODES[mode])
            assert found == _expected(mode), mode
            shell = await jail.exec("cat /etc/hosts /etc/resolv.conf", **MODES[mode])
            assert shell.stdout == "".join(_expected(mode).values()), mode
            own = await jail.exec(
                "cat /etc/hosts", read_only_paths=["/etc/hostname"], **MODES[mode]
            )
            assert own.stdout == _expected(mode)["hosts"], mode
        shares = jail._transport.postures.get("open").plan.shared is not None  # type: ignore[union-attr]
        assert shares is (built == "shared")


@pytest.mark.threat(28, 98)
async def test_no_run_can_change_the_name_files_of_another(jailed: OpenSession) -> None:
    """Some thirty ways in each mode; afterwards every mode has its own files."""
    async with jailed() as jail:
        for mode, options in MODES.items():
            found = await attack(jail, _TAMPER, **options)
            allowed = set() if jail.isolation.landlock_abi else {"ok", "EEXIST"}
            tries = found["tries"]
            own = {k: v for k, v in tries.items() if k.startswith(("write /run", "link /run"))}
            # The directory /run/sandbox belongs to the run; Landlock refuses to write to it.
            assert set(own.values()) <= {"EACCES"} | allowed, (mode, own)
            rest = {k: v for k, v in tries.items() if k not in own}
            assert "ok" not in rest.values(), (mode, rest)
            held = {v for k, v in tries.items() if k.startswith("read /run")}
            assert held == {"ENOENT"}, "files of other modes are out of reach"
            assert found["beside"] == "ok", "the control: /tmp is writable"
            for other, others in MODES.items():
                assert await attack(jail, _FILES, **others) == _expected(other), (mode, other)


@pytest.mark.threat(98)
async def test_all_modes_share_one_root_and_no_network(jailed: OpenSession) -> None:
    """Seen from the host: one parent of all user namespaces, a network namespace for each."""
    async with jailed() as jail:
        running = []
        for options in MODES.values():
            number = f"60.{len(running)}{os.getpid()}"
            proc = await jail.run(f"echo up; exec sleep {number}", stdout=True, **options)
            assert await anext(proc.iter_stdout_lines()) == "up"
            running.append((proc, _pid_of(number)))
        postures = jail._transport.postures  # type: ignore[union-attr]
        roots = {id(postures.get(shape).root) for shape in MODES}
        assert len(roots) == 1
        pids = [pid for _, pid in running]
        for name in ("user", "mnt", "pid", "ipc", "net"):
            assert len({namespace(pid, name) for pid in pids}) == len(pids), name
        assert namespace(pids[-1], "net") == namespace("self", "net"), "the control"
        for proc, _ in running:
            proc.kill()
            await proc.wait()


def _pid_of(argument: str) -> int:
    """Return the command that has this argument, once the shell has become it."""

    def found() -> list[int]:
        pids = [one["2"] for one in sandboxes() if "2" in one]
        return [pid for pid in pids if argument.encode() in _arguments(pid)]

    assert eventually(lambda: len(found()) == 1)
    return found()[0]


def _arguments(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []  # it has just ended


async def test_a_path_that_the_caller_names_is_never_replaced(jailed: OpenSession) -> None:
    """The caller shows the host's own file; without that, a blocked run has another one."""
    expected = Path("/etc/hosts").read_text()
    async with jailed(read_only_paths=["/etc/hosts"]) as jail:
        for options in MODES.values():
            assert (await jail.exec("cat /etc/hosts", **options)).stdout == expected
    async with jailed() as jail:
        assert (await jail.exec("cat /etc/hosts")).stdout == _OWN_HOSTS != expected


async def test_a_replaced_name_file_of_the_host_is_shown_to_the_next_open_run(
    jailed: OpenSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mount keeps the old file, so the root is built again; other modes do not look."""
    async with jailed() as jail:
        for mode in ("blocked", "open"):
            await jail.exec("true", **MODES[mode])
        postures = jail._transport.postures  # type: ignore[union-attr]
        root = postures.get("blocked").root
        assert postures.get("open").root is root
        monkeypatch.setattr(_private_root, "name_files_now", lambda: ((1, 2), None))
        assert postures.get("blocked").root is root
        assert postures.get("open").root is not root
        assert root.is_closed
        assert (await jail.exec("echo fine")).stdout == "fine\n"


# Landlock's rule for the work dir.


_BESIDE = """
above = os.path.dirname(given["work"])
work = given["work"]
tries = {
    "write": attempt(write, above + "/new"),
    "mkdir": attempt(os.mkdir, above + "/new"),
    "symlink": attempt(os.symlink, "/tmp", above + "/new"),
    "link": attempt(os.link, work + "/own", above + "/new"),
    "fifo": attempt(os.mkfifo, above + "/new"),
    "socket": attempt(lambda: socket.socket(socket.AF_UNIX).bind(above + "/new")),
    "move out": attempt(os.rename, work + "/own", above + "/new"),
    "rename": attempt(os.rename, work, above + "/moved"),
    "rmdir": attempt(os.rmdir, work),
    "chmod": attempt(os.chmod, above, 0o777),
    "utime": attempt(os.utime, above),
    "xattr": attempt(os.setxattr, above, "user.x", b"y"),
    "unnamed": attempt(os.open, above, os.O_RDWR | os.O_TMPFILE),
    "through ..": attempt(write, work + "/../new"),
    "through /proc": attempt(write, "/proc/self/cwd/../new"),
}
out["tries"] = tries
out["listed"] = os.listdir(above)
out["own"] = attempt(write, work + "/new")
"""


@pytest.mark.threat(28)
@pytest.mark.parametrize("where", ["private", "pinned"])
async def test_the_directory_above_the_work_dir_stays_read_only(
    jailed: OpenSession, outside_tmp: Path, where: str
) -> None:
    """Landlock's rule is on that directory; its mount refuses, and nothing reaches the host."""
    pinned = outside_tmp / "work"
    pinned.mkdir()
    options = {} if where == "private" else {"host_work_dir": str(pinned)}
    async with jailed(**options) as jail:
        above = Path(jail.work_dir).parent
        if above == Path("/tmp"):
            pytest.skip("the work dir is in /tmp, which a sandbox may write: create /var/tmp")
        await jail.put_bytes("own", b"x")
        found = await attack(jail, _BESIDE, given={"work": jail.work_dir})
        tries = found["tries"]
        assert "ok" not in tries.values(), tries
        assert tries["write"] == tries["mkdir"] == tries["symlink"] == "EROFS"
        assert found["listed"] == [Path(jail.work_dir).name], "it holds nothing else"
        assert found["own"] == "ok", "the control: the work dir is writable"
        assert not {"new", "moved"} & set(os.listdir(above))


_ON_REQUEST = """
import sys
print("up", flush=True)
for line in sys.stdin:
    try:
        open(line.strip(), "w").write("x")
        print("ok", flush=True)
    except OSError as exc:
        print(exc.errno, flush=True)
"""


_MOUNT_OVER = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
pid, place = sys.argv[1:]
inside = open(f"/proc/{pid}/uid_map").read().split()[0]
spaces = [os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY) for name in ("user", "mnt")]
for space in spaces:
    assert libc.setns(space, 0) == 0, os.strerror(ctypes.get_errno())
options = f"mode=777,uid={inside}".encode()
assert libc.mount(b"layer", place.encode(), b"tmpfs", 0, options) == 0, os.strerror(ctypes.get_errno())
"""


@pytest.mark.threat(28)
@pytest.mark.parametrize("beside", [False, True])
async def test_what_is_mounted_over_the_work_dir_is_writable(
    cell: str, outside_tmp: Path, *, beside: bool
) -> None:
    """Unless the directory above shows something else: the old rule protects that, by name."""
    data, work = outside_tmp / "data", str(outside_tmp / "work")
    data.mkdir()
    os.mkdir(work)
    options = {"host_work_dir": work, "read_only_paths": [str(data)] if beside else []}
    async with session_of(cell, **options) as jail:
        if not jail.isolation.landlock_abi:
            pytest.skip("this kernel has no Landlock: enable CONFIG_SECURITY_LANDLOCK")
        mark = f"mark-{os.getpid()}"
        proc = await jail.run(["python", "-c", _ON_REQUEST, mark], stdin=True, stdout=True)
        lines = proc.iter_stdout_lines()
        assert await anext(lines) == "up"
        pid = _pid_of(mark)
        assert proc.stdin is not None
        stdin = proc.stdin

        async def answer(path: str) -> str:
            stdin.write(f"{path}\n".encode())
            await stdin.drain()
            return await anext(lines)

        assert await answer(f"{work}/before") == "ok"
        # A file system that no rule knows, mounted from outside by the owner of the namespaces.
        subprocess.run([sys.executable, "-I", "-c", _MOUNT_OVER, str(pid), work], check=True)
        assert await answer(f"{work}/after") == ("13" if beside else "ok")
        assert await answer(f"{outside_tmp}/beside") == "30"
        assert await answer(f"{data}/new") != "ok"
        assert await answer("/tmp/fine") == "ok"
        assert not Path(work, "after").exists()
        assert Path(work, "before").exists()
