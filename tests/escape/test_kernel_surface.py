"""Attacks on the kernel: calls, families, files and calling conventions that must be refused."""

# ruff: noqa: E501 - an attack program keeps each try on one line
from __future__ import annotations

import os
import platform
import shutil
import socket
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio
from tests.conftest import ISOLATED, session_of
from tests.escape.inside import attack, outside, outside_is_filtered

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from union import sandbox as sb

pytestmark = [pytest.mark.spec("G2"), pytest.mark.asyncio(loop_scope="module")]
_X86 = platform.machine() == "x86_64"


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=ISOLATED)
async def jail(request: pytest.FixtureRequest) -> AsyncIterator[sb.Session]:
    """One session for all attacks: each is a run of its own and leaves nothing to the next."""
    async with session_of(request.param) as session:
        yield session


_NAMESPACES = """
flags = {"user": 0x10000000, "mount": 0x20000, "pid": 0x20000000, "net": 0x40000000, "ipc": 0x8000000,
         "uts": 0x4000000, "cgroup": 0x2000000, "time": 0x80}
def tries():
    found = {}
    for name, flag in flags.items():
        found["unshare " + name] = call("unshare", flag)
        if name != "time":
            ctypes.set_errno(0)
            pid = libc.syscall(ctypes.c_long(NR["clone"]), ctypes.c_long(flag | 17), None, None, None, None)
            if pid == 0:
                os._exit(0)
            found["clone " + name] = "ok" if pid > 0 else errno.errorcode[ctypes.get_errno()]
        args = struct.pack("11Q", flag, 0, 0, 0, 17, 0, 0, 0, 0, 0, 0)
        ctypes.set_errno(0)
        pid = libc.syscall(ctypes.c_long(NR["clone3"]), args, ctypes.c_long(88))
        if pid == 0:
            os._exit(0)
        found["clone3 " + name] = "ok" if pid > 0 else errno.errorcode[ctypes.get_errno()]
    return found
"""


def _all_refused(found: dict[str, str]) -> bool:
    return all(
        result == ("ENOSYS" if name.startswith("clone3") else "EPERM")
        for name, result in found.items()
    )


@pytest.mark.threat(54, 55)
async def test_no_namespace_can_be_made(jail: sb.Session) -> None:
    """unshare, clone and clone3, each kind; a plain fork works."""
    code = f"{_NAMESPACES}\nout.update(tries())\nos.fork() or os._exit(0)\nout['fork'] = 'EPERM'"
    found = await attack(jail, code)
    assert _all_refused(found), found
    assert len(found) > 20
    bare = "out['user'] = call('unshare', 0x10000000)"
    assert (await outside(bare))["user"] == "ok", "this host lets anybody make one"


@pytest.mark.threat(54, 74)
async def test_no_namespace_can_be_made_from_a_thread_or_by_a_program(jail: sb.Session) -> None:
    """A thread, an exec'd interpreter, a shell and the unshare tool."""
    code = f"""{_NAMESPACES}
import threading
found = []
thread = threading.Thread(target=lambda: found.append(tries()))
thread.start(); thread.join()
out.update(found[0])
"""
    assert _all_refused(await attack(jail, code))
    probe = (
        "import ctypes; l = ctypes.CDLL(None, use_errno=True); "
        "print(l.unshare(0x10000000), ctypes.get_errno())"
    )
    for command in (
        ["python", "-c", probe],
        f'python -c "{probe}"',
        f"env sh -c 'python -c \"{probe}\"'",
    ):
        assert (await jail.exec(command)).stdout == "-1 1\n"
    if shutil.which("unshare"):
        result = await jail.exec("unshare -U true; echo $?; unshare --fork true; echo $?")
        assert result.stdout.split() == ["1", "0"], "it works when it makes no namespace"


_CALLS = {
    # Name -> calls whose arguments would do no harm if they were allowed.
    "56 mount": "call('mount', b'x', b'/nowhere', b'tmpfs', 0, None)",
    "56 umount": "call('umount2', b'/nowhere', 0)",
    "56 pivot_root": "call('pivot_root', b'/nowhere', b'/nowhere')",
    "56 chroot": "call('chroot', b'/nowhere')",
    "56 fsopen": "call('fsopen', b'tmpfs', 0)",
    "56 fsconfig": "call('fsconfig', -1, 0, None, None, 0)",
    "56 fsmount": "call('fsmount', -1, 0, 0)",
    "56 fspick": "call('fspick', -100, b'/nowhere', 0)",
    "56 open_tree": "call('open_tree', -100, b'/', 0)",
    "56 move_mount": "call('move_mount', -1, b'', -1, b'', 0)",
    "56 mount_setattr": "call('mount_setattr', -1, b'', 0, b'', 0)",
    "54 setns": "call('setns', -1, 0)",
    "59 io_uring_setup": "call('io_uring_setup', 1, ctypes.create_string_buffer(120))",
    "59 io_uring_enter": "call('io_uring_enter', -1, 0, 0, 0, None, 0)",
    "59 io_uring_register": "call('io_uring_register', -1, 0, None, 0)",
    "64 userfaultfd": "call('userfaultfd', 0)",
    "64 userfaultfd user-only": "call('userfaultfd', 1)",
    "65 bpf": "call('bpf', 0, ctypes.create_string_buffer(128), 128)",
    "65 perf_event_open": "call('perf_event_open', ctypes.create_string_buffer(128), 0, -1, -1, 0)",
    "66 add_key": "call('add_key', b'user', b'plant', b'x', 1, -3)",
    "66 request_key": "call('request_key', b'user', b'plant', None, 0)",
    "66 keyctl": "call('keyctl', 0, -3, 0)",
    "67 personality": "call('personality', 0x400000)",
    "67 personality no-randomize": "call('personality', 0x40000)",
    "68 init_module": "call('init_module', b'', 0, b'')",
    "68 finit_module": "call('finit_module', -1, b'', 0)",
    "68 delete_module": "call('delete_module', b'no-such-module', 0)",
    "68 kexec_load": "call('kexec_load', 0, 99, None, 0)",
    "68 kexec_file_load": "call('kexec_file_load', -1, -1, 0, None, 0)",
    "68 reboot": "call('reboot', 1, 2, 3, None)",
    "68 swapon": "call('swapon', b'/nowhere', 0)",
    "68 swapoff": "call('swapoff', b'/nowhere')",
    "68 settimeofday": "call('settimeofday', None, None)",
    "68 clock_settime": "call('clock_settime', 99, None)",
    "68 clock_adjtime": "call('clock_adjtime', 99, None)",
    "68 acct": "call('acct', b'/nowhere')",
    "68 quotactl": "call('quotactl', 0, None, 0, None)",
    "68 sethostname": "call('sethostname', b'sandbox', 7)",
    "72 syslog": "call('syslog', 3, ctypes.create_string_buffer(16), 16)",
    "34 kcmp": "call('kcmp', os.getpid(), os.getpid(), 0, 0, 0)",
    "26 name_to_handle_at": "call('name_to_handle_at', -100, b'/', ctypes.create_string_buffer(160), ctypes.create_string_buffer(8), 0)",
}
if _X86:
    _CALLS |= {
        "67 modify_ldt": "call('modify_ldt', 0, ctypes.create_string_buffer(16), 16)",
        "68 iopl": "call('iopl', 0)",
        "68 ioperm": "call('ioperm', 0, 1, 0)",
    }
_ANYBODY_MAY = ("66 keyctl", "67 personality", "34 kcmp", "26 name_to_handle_at")
"""Calls that only our filter refuses: an unconfined child may make them on any kernel."""


@pytest.mark.threat(26, 34, 54, 56, 59, 64, 65, 66, 67, 68, 72)
@pytest.mark.parametrize("name", sorted(_CALLS))
async def test_a_call_is_refused(jail: sb.Session, name: str) -> None:
    """Not an argument error, a refusal."""
    code = f"out['try'] = {_CALLS[name]}\nout['alive'] = call(given['getpid'])"
    getpid = 39 if _X86 else 172
    found = await attack(jail, code, given={"getpid": getpid})
    assert found == {"try": "EPERM", "alive": "ok"}
    if name in _ANYBODY_MAY and not outside_is_filtered():
        assert (await outside(code, given={"getpid": getpid}))["try"] not in {"EPERM", "ENOSYS"}


_INT80 = """
import mmap
page = mmap.mmap(-1, 4096, prot=7)
page.write(bytes.fromhex("5389f889f389d131d2cd805bc3"))
gate = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int)(
    ctypes.addressof(ctypes.c_char.from_buffer(page)))
def through(number, first=0, second=0):
    near, far = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(far, struct.pack("i", gate(number, first, second)))
        os._exit(0)
    os.close(far)
    data = os.read(near, 4)
    _, status = os.waitpid(pid, 0)
    return "killed" if os.WIFSIGNALED(status) else struct.unpack("i", data)[0]
for name, (number, first) in given["calls"].items():
    out[name] = through(number, first)
"""


@pytest.mark.threat(57, 61)
@pytest.mark.skipif(not _X86, reason="int 0x80 is an instruction of x86")
async def test_32_bit_calls_are_refused(jail: sb.Session) -> None:
    """Even getpid; socketcall and socket would hide their family there."""
    calls = {"getpid": (20, 0), "unshare": (310, 0x10000000), "keyctl": (288, 0),
             "io_uring_setup": (425, 1), "socketcall": (102, 1), "socket": (359, 40)}  # fmt: skip
    found = await attack(jail, _INT80, given={"calls": calls})
    assert set(found.values()) <= {-1, "killed"}, found
    bare = await outside(_INT80, given={"calls": {"getpid": (20, 0)}})
    assert bare["getpid"] == "killed" or bare["getpid"] > 1, "the gate itself is well-formed"


@pytest.mark.threat(58)
@pytest.mark.skipif(not _X86, reason="x32 is a convention of x86-64")
async def test_x32_numbers_are_refused(jail: sb.Session) -> None:
    """Bit 30 set: getpid, unshare, socket and one of x32's own numbers."""
    code = "for n in (39, 272, 41, 512, 547): out[str(n)] = call(n | 0x40000000, 0x10000000, 0, 0)"
    assert set((await attack(jail, code)).values()) == {"EPERM"}


@pytest.mark.threat(56, 74)
async def test_numbers_newer_than_the_policy_are_unknown(jail: sb.Session) -> None:
    """A later kernel's calls have not been judged, so they do not exist."""
    code = "for n in (470, 480, 512, 600, 1000, 100000): out[str(n)] = call(n, 0, 0, 0)"
    assert set((await attack(jail, code)).values()) == {"ENOSYS"}


_FAMILIES = {
    "AX25": 3, "IPX": 4, "APPLETALK": 5, "NETROM": 6, "X25": 9, "ROSE": 11, "KEY": 15, "PACKET": 17,
    "RDS": 21, "PPPOX": 24, "LLC": 26, "CAN": 29, "TIPC": 30, "BLUETOOTH": 31, "RXRPC": 33,
    "PHONET": 35, "CAIF": 37, "ALG": 38, "NFC": 39, "VSOCK": 40, "KCM": 41, "QIPCRTR": 42, "SMC": 43,
    "XDP": 44, "MCTP": 45,
}  # fmt: skip


@pytest.mark.threat(60, 61, 62)
async def test_rare_socket_families_are_refused(jail: sb.Session) -> None:
    """With upper bits set as well; TCP, UDP and local sockets work."""
    code = """
    for name, family in given["families"].items():
        for kind in (1, 2, 3, 5):
            for high in (0, 1 << 32):
                out[f"{name} {kind} {high}"] = call("socket", family | high, kind, 0)
        out[f"{name} pair"] = call("socketpair", family, 1, 0, ctypes.create_string_buffer(8))
    out["control"] = [call("socket", family, kind, 0) for family in (1, 2, 10) for kind in (1, 2)]
    """
    found = await attack(jail, code, given={"families": _FAMILIES})
    control = found.pop("control")
    # Who shares the id of its caller has no local datagrams: see test_shared_counters.
    assert control.pop(1) == ("EPROTONOSUPPORT" if jail.isolation.ids == "caller" else "ok")
    assert set(control) == {"ok"}
    assert set(found.values()) == {"EPERM"}, {k: v for k, v in found.items() if v != "EPERM"}


@pytest.mark.threat(62)
async def test_raw_sockets_are_refused(jail: sb.Session) -> None:
    """IPv4 and IPv6, by type and by odd protocols."""
    code = """
    for family in (2, 10):
        for kind, protocol in ((3, 1), (3, 255), (3, 0), (10, 3), (1, 132), (1, 262), (2, 136), (5, 132), (6, 33)):
            out[f"{family} {kind} {protocol}"] = call("socket", family, kind, protocol)
    """
    assert set((await attack(jail, code)).values()) == {"EPERM"}


@pytest.mark.threat(63)
async def test_netlink_beyond_route_is_refused(jail: sb.Session) -> None:
    """Netfilter, crypto, audit, generic and the others; route is there for libc."""
    code = """
    for protocol in range(1, 23):
        out[str(protocol)] = call("socket", 16, 3, protocol)
    out["route"] = [call("socket", 16, kind, 0) for kind in (2, 3)]
    out["names"] = [name for _, name in socket.if_nameindex()]
    """
    found = await attack(jail, code)
    assert (found.pop("route"), found.pop("names")) == (["ok", "ok"], ["lo"])
    assert set(found.values()) == {"EPERM"}, found


@pytest.mark.threat(69, 70, 71)
async def test_no_kernel_setting_opens_for_writing(jail: sb.Session) -> None:
    """Every file of /proc/sys, sysrq, cgroups, even when the host is root."""
    code = """
    opened, seen = [], 0
    for top in ("/proc/sys", "/proc/irq", "/proc/bus", "/proc/fs", "/sys"):
        for where, _, names in os.walk(top):
            for name in names:
                seen += 1
                path = os.path.join(where, name)
                try:
                    os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
                    opened.append(path)
                except OSError:
                    pass
    for path in ("/proc/sysrq-trigger", "/proc/sys/kernel/core_pattern", "/proc/sys/kernel/modprobe",
                 "/proc/sys/vm/drop_caches", "/proc/sys/kernel/ns_last_pid", "/proc/mtrr", "/proc/scsi/scsi",
                 "/sys/kernel/uevent_helper", "/sys/fs/cgroup/cgroup.procs", "/sys/fs/cgroup/memory/release_agent",
                 "/sys/kernel/mm/transparent_hugepage/enabled", "/proc/latency_stats", "/proc/timer_stats"):
        if attempt(os.open, path, os.O_WRONLY) == "ok":
            opened.append(path)
    out["opened"], out["seen"] = opened, seen
    out["control"] = read("/proc/sys/kernel/ostype")
    """
    found = await attack(jail, code)
    assert found["control"] == "Linux\n"
    assert found["seen"] > 100
    assert found["opened"] == []


@pytest.mark.threat(70)
async def test_control_groups_are_out_of_reach(jail: sb.Session) -> None:
    """No mount of them inside, and no name of the host's group."""
    code = """
    out["mounts"] = [line for line in read("/proc/self/mountinfo").splitlines() if "cgroup" in line]
    out["sys"] = os.path.exists("/sys/fs/cgroup")
    out["paths"] = sorted({line.split(":", 2)[2] for line in read("/proc/self/cgroup").splitlines()})
    """
    found = await attack(jail, code)
    assert (found["mounts"], found["sys"]) == ([], False)
    if jail.isolation.proc == "fresh":
        assert found["paths"] == ["/"]


@pytest.mark.threat(72)
async def test_kernel_memory_symbols_and_log_are_closed(jail: sb.Session) -> None:
    """kcore, kmsg, kallsyms without addresses, the pagemap without frames."""
    code = """
    for path in ("/proc/kcore", "/proc/kmsg", "/dev/kmsg", "/dev/mem", "/proc/kpagecount", "/proc/kpageflags",
                 "/proc/vmallocinfo", "/proc/slabinfo", "/sys/kernel/debug", "/sys/kernel/tracing"):
        out[path] = attempt(lambda: open(path, "rb").read(1)[0])
    try:
        lines = [line for line in read("/proc/kallsyms").splitlines()[:1000]]
    except OSError:
        lines = []
    out["symbols"] = sorted({line.split()[0] for line in lines if int(line.split()[0], 16)})
    with open("/proc/self/pagemap", "rb") as file:
        file.seek(id(out) // 4096 * 8)
        out["frame"] = struct.unpack("Q", file.read(8))[0] & (1 << 55) - 1
    """
    found = await attack(jail, code)
    assert found.pop("symbols") == []
    assert found.pop("frame") == 0
    assert "ok" not in found.values(), found


@pytest.mark.threat(73)
async def test_a_program_from_memory_is_confined_too(jail: sb.Session) -> None:
    """memfd and execveat: it runs, with the same filter and the same view."""
    code = """
    fd = os.memfd_create("cat", 0)
    with open("/bin/cat", "rb") as file:
        os.write(fd, file.read())
    result = subprocess.run([f"/proc/self/fd/{fd}", "/proc/self/status", given["plant"]], executable=f"/proc/self/fd/{fd}",
                          pass_fds=[fd], capture_output=True, text=True)
    status = dict(line.split(":\\t", 1) for line in result.stdout.splitlines() if ":\\t" in line)
    out.update({name: status[name] for name in ("Seccomp", "NoNewPrivs", "CapBnd", "CapEff")})
    out["refused"] = "No such file" in result.stderr
    """
    found = await attack(jail, code, given={"plant": "/etc/shadow"})
    none = "0" * 16
    assert found == {
        "Seccomp": "2", "NoNewPrivs": "1", "CapBnd": none, "CapEff": none, "refused": True,
    }  # fmt: skip


@pytest.mark.threat(74)
async def test_the_filter_holds_in_every_kind_of_run(jail: sb.Session) -> None:
    """Shell, argv, Python, a thread, a child, a script of many MiB."""
    shell = "grep -E '^(Seccomp|NoNewPrivs):' /proc/self/status"
    wanted = "NoNewPrivs:\t1\nSeccomp:\t2\n"
    assert (await jail.exec(shell)).stdout == wanted
    assert (await jail.exec(["sh", "-c", shell])).stdout == wanted
    assert (await jail.exec("#" * 2**20 + "\n" + shell)).stdout == wanted
    code = """
    import threading
    def look(path="/proc/thread-self/status"):
        out[threading.current_thread().name] = [read(path).split(n + ":")[1].split()[0] for n in ("Seccomp", "NoNewPrivs")]
    look()
    thread = threading.Thread(target=look, name="thread")
    thread.start(); thread.join()
    """
    found = await attack(jail, code)
    assert found == {"MainThread": ["2", "1"], "thread": ["2", "1"]}


@pytest.mark.threat(69, 74)
async def test_privileges_cannot_be_gained_back(jail: sb.Session) -> None:
    """Set-uid programs, setuid calls, securebits: all of no effect."""
    code = """
    out["setuid"] = [attempt(os.setuid, 0), attempt(os.setgid, 0), attempt(os.setgroups, [0])]
    out["prctl"] = [libc.prctl(38, 0, 0, 0, 0), libc.prctl(28, 0, 0, 0, 0), libc.prctl(47, 2, 21, 0, 0)]
    out["map"] = [attempt(write, f"/proc/self/{name}", "0 0 1", os.O_WRONLY) for name in ("uid_map", "gid_map", "setgroups")]
    result = subprocess.run(["sh", "-c", "for p in su mount newuidmap passwd sudo; do command -v $p; done"], capture_output=True, text=True)
    out["ids"] = []
    for program in result.stdout.split():
        done = subprocess.run([program, "--version"], capture_output=True, stdin=subprocess.DEVNULL)
    out["caps"] = [line.split()[1] for line in read("/proc/self/status").splitlines() if line.startswith("Cap")]
    out["own"] = attempt(os.setuid, os.getuid())
    """
    found = await attack(jail, code)
    assert "ok" not in (*found["setuid"], *found["map"]), found
    assert set(found["prctl"]) == {-1}
    assert set(found["caps"]) == {"0" * 16}
    assert found["own"] == "ok"


_EVERYDAY = {
    "threads": "import threading; t = threading.Thread(target=lambda: None); t.start(); t.join()",
    "processes": "import multiprocessing as m; assert m.get_context('fork').Pool(2).map(abs, [-1, -2]) == [1, 2]",
    "spawn": "subprocess.run(['true'], check=True)",
    "asyncio": "import asyncio; asyncio.run(asyncio.create_subprocess_exec('true'))",
    "tcp": "s = socket.create_server(('127.0.0.1', 0)); socket.create_connection(s.getsockname()).close()",
    "tcp6": "s = socket.create_server(('::1', 0), family=socket.AF_INET6); socket.create_connection(s.getsockname()[:2])",
    "names": "assert socket.getaddrinfo('localhost', 80)",
    "unix": "s = socket.socket(socket.AF_UNIX); s.bind('\\0x'); s.listen(); socket.socket(socket.AF_UNIX).connect('\\0x')",
    "sqlite": "import sqlite3; sqlite3.connect('db.sqlite').execute('create table if not exists t (x)')",
    "tempfile": "import tempfile; tempfile.NamedTemporaryFile().write(b'x')",
    "mmap": "import mmap; mmap.mmap(-1, 4096)[0:1]",
    "shared memory": "from multiprocessing import shared_memory as m; b = m.SharedMemory(create=True, size=9); b.close(); b.unlink()",
    "ssl": "import ssl; ssl.create_default_context()",
    "timers": "signal.signal(14, lambda *a: None); signal.setitimer(signal.ITIMER_REAL, 0.01); time.sleep(0.05)",
    "epoll": "import select; select.epoll().register(os.eventfd(0))",
    "locks": "import fcntl; fcntl.flock(open('lock', 'w'), fcntl.LOCK_EX)",
    "user": "import pwd; assert pwd.getpwuid(os.getuid()).pw_name == 'sandbox'",
    "rlimits": "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (256, 1024))",
    "memfd": "os.write(os.memfd_create('x'), b'x')",
    "venv": "import venv; venv.create('made', with_pip=False)",
}


@pytest.mark.threat(75)
@pytest.mark.parametrize("name", sorted(_EVERYDAY))
async def test_everyday_python_works(jail: sb.Session, name: str) -> None:
    """A filter that breaks honest programs is broken too."""
    # As a child: what a facility leaves running must not keep the report waiting.
    assert await attack(jail, f"{_EVERYDAY[name]}\nout['done'] = True") == {"done": True}


@pytest.mark.threat(60, 62)
async def test_this_kernel_would_allow_what_is_refused() -> None:
    """The control of the families: this process can make ordinary rare sockets."""
    socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 15).close()
    if os.geteuid() == 0 and "CapEff:\t0000000000000000" not in _own_status():
        try:
            socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 3).close()
        except PermissionError:
            assert not int(_own_status().split("CapEff:")[1].split()[0], 16) & 1 << 13


def _own_status() -> str:
    with open("/proc/self/status", encoding="ascii") as file:
        return file.read()
