"""Attacks from inside a ``landlock`` session, as one program; it prints one JSON list.

It runs in a container of its own: some attacks, such as a signal to every process, would end the
machine of the tests if they succeeded. Each row is (name, outcome, detail). The outcome of an
attack is "held" or "OPEN", that of a control "works" or "BROKEN".
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import ctypes
import errno
import fcntl
import itertools
import json
import mmap
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inside_base import (
    BAIT,
    FASTOPEN,
    HOME,
    NR,
    PID,
    ROWS,
    SECRET,
    attack,
    call,
    control,
    libc,
    linked,
    must,
)

if TYPE_CHECKING:
    from collections.abc import Callable


def files() -> None:
    attack("read a file", lambda: Path(SECRET).read_text())
    attack("append to a file", lambda: os.write(os.open(SECRET, os.O_WRONLY | os.O_APPEND), b""))
    attack("list a directory", lambda: os.listdir(HOME))
    attack("read through a link", lambda: Path(linked("l1", SECRET)).read_text())
    attack("hard link of a file", lambda: (os.link(SECRET, "l2"), os.unlink("l2")))
    attack("rename a file", lambda: os.rename(BAIT["victim"], "l3"))
    attack("exchange two files", lambda: exchange(BAIT["victim2"]))
    attack("delete a file", lambda: os.unlink(BAIT["victim3"]))
    attack("create beside it", lambda: Path(HOME, "new").write_text(""))
    attack("truncate a file", lambda: os.truncate(BAIT["victim4"], 0))
    attack("chmod", lambda: os.chmod(SECRET, 0o600))
    attack("chmod through a link", lambda: os.chmod(linked("l4", SECRET), 0o600))
    attack("chmod of a readable file", lambda: os.fchmod(os.open(BAIT["readable"], 0), 0o644))
    attack("chmod below a handle", lambda: os.chmod("secret", 0o600, dir_fd=opened(HOME)))
    attack(
        "fchmodat2 of a handle", lambda: call(NR["fchmodat2"], opened(SECRET), b"", 0o600, 0x1000)
    )
    attack("chmod by ..", lambda: os.chmod(os.path.relpath(SECRET), 0o600))
    attack(
        "chmod by a link of /proc",
        lambda: os.chmod(linked("l6", "/proc/self/root" + SECRET), 0o600),
    )
    attack("chmod of a handle by /proc", lambda: os.chmod(f"/proc/self/fd/{opened(SECRET)}", 0o600))
    attack("file handle", lambda: file_handle(SECRET), harmless=False)
    attack("chown", lambda: os.chown(SECRET, -1, -1))
    attack("utime", lambda: os.utime(SECRET, (1, 1)))
    attack("utime through a link", lambda: os.utime(linked("l5", SECRET), (1, 1)))
    attack("utime of a readable file", lambda: os.utime(os.open(BAIT["readable"], 0), (1, 1)))
    attack("set an attribute", lambda: os.setxattr(SECRET, "user.x", b"x"))
    attack("open below a handle", lambda: os.open("secret", os.O_RDONLY, dir_fd=opened(HOME)))
    attack("open a handle again", lambda: Path(f"/proc/self/fd/{opened(SECRET)}").read_text())
    attack("execute a file", lambda: subprocess.check_output([BAIT["program"]]))
    attack("file in /tmp", lambda: Path("/tmp/was-here").write_text("x"))
    attack("file in /dev/shm", lambda: Path("/dev/shm/was-here").write_text("x"))
    attack(
        "watch a directory",
        lambda: call(NR["inotify_add_watch"], call(NR["inotify_init"], 0), HOME.encode(), 0xFFF),
    )
    attack("lease on a readable file", lambda: fcntl.fcntl(os.open(BAIT["readable"], 0), 1024, 0))
    attack(
        "flags of a readable file",
        lambda: fcntl.ioctl(os.open(BAIT["readable"], 0), 0x40086602, b"\0" * 8),
    )
    attack(
        "fs-verity of a readable file",
        lambda: fcntl.ioctl(os.open(BAIT["readable"], 0), 0x40806685, b"\0" * 128),
        harmless=False,
    )
    Path("own").write_text("x")
    attack("set-uid file", lambda: os.chmod("own", 0o4755))
    attack("set-gid file by descriptor", lambda: os.fchmod(os.open("own", 0), 0o2755))
    attack("set-uid file at its creation", lambda: os.open("suid", os.O_CREAT, 0o4755))
    attack("device node", lambda: os.mknod("node", 0o020666, os.makedev(1, 3)), harmless=False)
    attack("private file of /etc", lambda: Path("/etc/shadow").read_text(), harmless=False)
    attack("write to the library", lambda: os.open(os.__file__, os.O_WRONLY), harmless=False)
    attack("list of devices", lambda: os.listdir("/dev"))
    attack("mount", lambda: call(NR["mount"], b"t", b"/tmp", b"tmpfs", 0, None), harmless=False)
    attack("open_tree", lambda: call(NR["open_tree"], -100, b"/", 1), harmless=False)
    attack("user namespace", lambda: call(NR["unshare"], 0x10000000), harmless=False)
    attack("chroot", lambda: os.chroot("."), harmless=False)
    attack("another session's work dir", lambda: must(os.listdir(BAIT["other_work"])))
    attack("another session's scripts", lambda: must(os.listdir(BAIT["other_scratch"])))
    attack("checkpoint of the session", lambda: must(os.listdir(BAIT["checkpoint"])))
    attack("read a checkpoint", lambda: Path(BAIT["checkpoint"], "kept").read_text())
    attack("change a checkpoint", lambda: Path(BAIT["checkpoint"], "kept").write_text("kept"))
    attack("caller's environment", lambda: must(os.environ.get("HOST_TOKEN")), harmless=False)
    os.chdir(BAIT["work"])
    attack("chdir and read", lambda: (os.chdir(HOME), Path("secret").read_text()))
    os.chdir(BAIT["work"])


def file_handle(path: str) -> int:
    """Ask for a name of the file that no directory guards."""
    handle = ctypes.create_string_buffer(struct.pack("=Ii", 128, 0), 8 + 128)
    mount = ctypes.c_int()
    return call(
        NR["name_to_handle_at"], -100, path.encode(), handle, ctypes.byref(mount), ctypes.c_int(0)
    )


def terminal(flags: int) -> int:
    return os.open(BAIT["terminal"], flags | os.O_NOCTTY)


def other_abi(code: str, number: int) -> int:
    """Call `number` by machine code of x86, in a child: a refusal may kill it."""
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(bytes.fromhex(code))
    gate = ctypes.CFUNCTYPE(ctypes.c_long, ctypes.c_long)(
        ctypes.addressof(ctypes.c_char.from_buffer(page))
    )
    child = os.fork()
    if child == 0:
        os._exit(0 if gate(number) > 0 else 1)
    return must(os.waitpid(child, 0)[1] == 0)


def opened(path: str) -> int:
    return os.open(path, os.O_PATH)


def exchange(victim: str) -> None:
    Path("mine").write_text("x")
    call(316 if os.uname().machine == "x86_64" else 276, -100, b"mine", -100, victim.encode(), 2)


def metadata() -> None:
    """Not guarded: the one promise of the other backends that this one does not keep."""
    attack("stat", lambda: os.stat(SECRET).st_size)


def processes() -> None:
    attack(
        "environment of a process",
        lambda: must("very-secret" in Path(f"/proc/{PID}/environ").read_text()),
    )
    attack("command line of a process", lambda: must(Path(f"/proc/{PID}/cmdline").read_text()))
    attack("list of processes", lambda: must([p for p in os.listdir("/proc") if p.isdigit()]))
    attack("memory of a process", lambda: os.open(f"/proc/{PID}/mem", os.O_RDONLY))
    attack(
        "memory of the parent",
        lambda: os.open(f"/proc/{os.getppid()}/mem", os.O_RDONLY),
        harmless=False,
    )
    attack("descriptors of a process", lambda: must(os.listdir(f"/proc/{PID}/fd")))
    attack(
        "copy of a descriptor",
        lambda: call(NR["pidfd_getfd"], os.pidfd_open(PID), 0, 0),
        harmless=False,
    )
    attack("write to a terminal", lambda: os.write(terminal(os.O_WRONLY), b"x"))
    attack(
        "input to a terminal",
        lambda: fcntl.ioctl(terminal(os.O_RDWR), 0x5412, b"x"),
        harmless=False,
    )
    if os.uname().machine == "x86_64":
        # mov eax, edi; int 0x80; ret, and mov eax, edi; syscall; ret. Both ask for the own pid.
        attack("32-bit call", lambda: other_abi("89f8cd80c3", 20), harmless=False)
        attack("x32 call", lambda: other_abi("89f80f05c3", 0x40000000 | 39), harmless=False)
        if must(other_abi("89f80f05c3", 39)):
            ROWS.append(("call by machine code", "works", ""))
    attack(
        "process_vm_readv", lambda: must(call(NR["readv"], PID, *vectors(), 0) > 0), harmless=False
    )
    attack("ptrace", lambda: call(NR["ptrace"], 0x4206, PID, 0, 0))
    attack("signal", lambda: os.kill(PID, signal.SIGCONT))
    attack("signal 0", lambda: os.kill(PID, 0))
    attack(
        "signal by descriptor", lambda: signal.pidfd_send_signal(os.pidfd_open(PID), signal.SIGCONT)
    )
    attack("signal to the parent", lambda: os.kill(os.getppid(), signal.SIGCONT))
    attack("signal to the session's process", lambda: os.kill(BAIT["host"], signal.SIGCONT))
    attack("signal to the group of a process", lambda: os.killpg(BAIT["group"], signal.SIGCONT))
    attack(
        "queued signal",
        lambda: call(129 if os.uname().machine == "x86_64" else 138, PID, 18, siginfo()),
        harmless=False,
    )
    attack("signal by a descriptor's owner", owner_signal)
    attack("signal to everything", everything, harmless=False)
    attack("limits of a process", lambda: resource.prlimit(PID, resource.RLIMIT_CORE))
    attack(
        "set limits of a process",
        lambda: resource.prlimit(PID, resource.RLIMIT_CORE, (0, 0)),
        harmless=False,
    )
    attack("processors of a process", lambda: os.sched_setaffinity(PID, os.sched_getaffinity(0)))
    attack("priority of a process", lambda: os.setpriority(os.PRIO_PROCESS, PID, 5))
    attack("priority of a user", lambda: os.setpriority(os.PRIO_USER, 0, 19), harmless=False)
    attack(
        "input priority of a user", lambda: call(NR["ioprio_set"], 3, 0, 3 << 13), harmless=False
    )
    attack("memory score of a process", lambda: os.open(f"/proc/{PID}/oom_score_adj", os.O_WRONLY))
    attack("shared memory", lambda: call(NR["shmget"], 0, 4096, 0o1600))
    attack("message queue", lambda: call(NR["mq_open"], b"attack", 0o102, 0o600, None))


def vectors() -> tuple[Any, ...]:
    buffer = ctypes.create_string_buffer(16)
    vector = (ctypes.c_uint64 * 2)(ctypes.addressof(buffer), 16)
    return ctypes.byref(vector), 1, ctypes.byref(vector), 1


def siginfo() -> Any:
    return ctypes.create_string_buffer(struct.pack("iii", 18, 0, -1), 128)


def owner_signal() -> Any:
    """Let the kernel send SIGIO, whose default action ends a process, when bytes arrive."""
    near, far = socket.socketpair()
    fcntl.fcntl(near, fcntl.F_SETOWN, BAIT["sigio_pid"])
    fcntl.fcntl(near, fcntl.F_SETFL, os.O_ASYNC)
    far.send(b"x")
    for _ in range(50):
        try:
            os.kill(BAIT["sigio_pid"], 0)
        except ProcessLookupError:
            return "ended"
        except PermissionError:
            break
        threading.Event().wait(0.01)
    raise OSError(errno.EPERM, "no effect that can be seen here")


def everything() -> None:
    """The bait counts its SIGUSR1; the test looks at the count."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    child = os.fork()
    if child == 0:
        with contextlib.suppress(OSError):
            os.kill(-1, signal.SIGUSR1)
        os._exit(0)
    os.waitpid(child, 0)
    raise OSError(errno.EPERM, "the test looks at the effect")


def tcp(address: tuple[str, int], family: int = socket.AF_INET) -> bytes:
    with socket.socket(family) as sock:
        sock.settimeout(3)
        sock.connect(address)
        return must(sock.recv(16))


def network() -> None:
    port = BAIT["port"]
    attack("tcp to loopback", lambda: tcp(("127.0.0.1", port)))
    attack("tcp to 0.0.0.0", lambda: tcp(("0.0.0.0", port)))
    attack("tcp to a mapped address", lambda: tcp(("::ffff:127.0.0.1", port), socket.AF_INET6))
    if BAIT["has_ipv6"]:
        attack("tcp to ::1", lambda: tcp(("::1", port), socket.AF_INET6))
    attack("tcp fast open", lambda: fast_open(port))
    attack("tcp fast open by sendmsg", lambda: fast_open_message(port))
    attack("udp", lambda: must(datagram(port)))
    attack("raw", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1), harmless=False)
    attack("netlink", lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0))
    attack("vsock", lambda: socket.socket(40, socket.SOCK_STREAM), harmless=False)
    attack("packet", lambda: socket.socket(17, socket.SOCK_RAW), harmless=False)
    attack("listen without bind", lambda: must(listening(bind=False)))
    attack("bind and listen", lambda: must(listening(bind=True)))
    attack("unix socket", lambda: unix(BAIT["unix"]))
    attack("unix socket through a link", lambda: unix(linked("l8", BAIT["unix"])))
    attack("unix socket by ..", lambda: unix(os.path.relpath(BAIT["unix"])))
    attack("unix socket of another run", lambda: unix(BAIT["other_unix"]))
    attack("abstract socket", lambda: unix("\0" + BAIT["abstract"]))
    attack("unix datagram", unix_datagram)
    attack("unix datagram of a raw socket", unix_raw)
    attack("io_uring", lambda: call(425, 1, ctypes.create_string_buffer(120)), harmless=False)
    attack("race on an address", race_connect, harmless=False)
    attack("race on a link", race_chmod, harmless=False)
    attack("race on a link, times", race_utime, harmless=False)


def fast_open(port: int) -> bytes:
    with socket.socket() as sock:
        sock.sendto(b"x", FASTOPEN, ("127.0.0.1", port))
        return must(sock.recv(16))


def fast_open_message(port: int) -> bytes:
    with socket.socket() as sock:
        sock.sendmsg([b"x"], [], FASTOPEN, ("127.0.0.1", port))
        return must(sock.recv(16))


def datagram(port: int) -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        return sock.sendto(b"x", ("127.0.0.1", port))


def listening(*, bind: bool) -> Any:
    with socket.socket() as sock:
        if bind:
            sock.bind(("0.0.0.0", 0))
        sock.listen(1)
        return sock.getsockname()


def unix(path: str) -> bytes:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(3)
        sock.connect(path)
        return must(sock.recv(16))


def unix_datagram() -> int:
    near, _far = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    return near.sendto(b"x", BAIT["unix"] + ".d")


def unix_raw() -> int:
    """Send by a socket that was made as a raw one, of which the kernel makes a datagram socket."""
    near, _far = socket.socketpair(socket.AF_UNIX, socket.SOCK_RAW)
    return near.sendmsg([b"x"], [], 0, BAIT["unix"] + ".d")


def race_connect() -> Any:
    """Connect with an address that another thread keeps changing."""
    allowed = BAIT["allowed"]
    if not allowed:
        raise OSError(errno.EACCES, "nothing is allowed")
    good, bad = (
        struct.pack("=H", socket.AF_INET)
        + struct.pack(">H4s8x", port, socket.inet_aton("127.0.0.1"))
        for port in (allowed, BAIT["port"])
    )
    buffer, stop = ctypes.create_string_buffer(good, 16), threading.Event()

    def flip() -> None:
        while not stop.is_set():
            ctypes.memmove(buffer, bad, 16)
            ctypes.memmove(buffer, good, 16)

    thread = threading.Thread(target=flip)
    thread.start()
    reached, connected = 0, 0
    for _ in range(100):
        with socket.socket() as sock:
            sock.settimeout(3)
            if libc.connect(sock.fileno(), buffer, 16) == 0:
                connected += 1
                reached += sock.recv(16) == b"SECRET"
    stop.set()
    thread.join()
    if not connected:
        raise RuntimeError("no connection was made: the race proves nothing")
    return must(reached)


def raced(action: Callable[[], None], check: Callable[[], Any]) -> Any:
    Path("mine").write_text("")
    stop = threading.Event()

    def flip() -> None:
        while not stop.is_set():
            for target in ("mine", SECRET):
                with contextlib.suppress(OSError):
                    os.unlink("swap")
                with contextlib.suppress(OSError):
                    os.symlink(target, "swap")

    thread = threading.Thread(target=flip)
    thread.start()
    done, end = 0, time.monotonic() + 10
    for tries in itertools.count():
        with contextlib.suppress(OSError):
            action()
            done += 1
        if (tries > 600 and done > 50) or time.monotonic() > end:
            break
    stop.set()
    thread.join()
    if done < 50:
        raise RuntimeError("few calls succeeded: the race proves nothing")
    return must(check())


def race_chmod() -> Any:
    return raced(lambda: os.chmod("swap", 0o757), lambda: os.stat(SECRET).st_mode & 0o777 == 0o757)


def race_utime() -> Any:
    return raced(lambda: os.utime("swap", (7, 7)), lambda: os.stat(SECRET).st_mtime == 7)


def hostile_memory() -> None:
    """Arguments that a reader of this memory could stumble over; each must be refused."""
    page = mmap.mmap(-1, 2 * mmap.PAGESIZE)
    base = ctypes.addressof(ctypes.c_char.from_buffer(page))
    libc.mprotect(ctypes.c_void_p(base + mmap.PAGESIZE), mmap.PAGESIZE, 0)
    page[: mmap.PAGESIZE] = b"a" * mmap.PAGESIZE
    at_end = ctypes.c_void_p(base + mmap.PAGESIZE - 4)
    chmod = NR["fchmodat"]
    attack("path without an end", lambda: call(chmod, -100, at_end, 0o600, 0), harmless=False)
    attack(
        "path at address 1", lambda: call(chmod, -100, ctypes.c_void_p(1), 0o600, 0), harmless=False
    )
    attack(
        "path in kernel space",
        lambda: call(chmod, -100, ctypes.c_void_p((1 << 64) - 4096), 0o600, 0),
        harmless=False,
    )
    attack("path of 64 KiB", lambda: call(chmod, -100, b"a" * 65536, 0o600, 0), harmless=False)
    attack("closed directory", lambda: call(chmod, 999, b"x", 0o600, 0), harmless=False)
    attack("negative directory", lambda: call(chmod, -5, b"x", 0o600, 0), harmless=False)
    attack(
        "times at address 1",
        lambda: call(NR["utimensat"], -100, b"mine", ctypes.c_void_p(1), 0),
        harmless=False,
    )
    attack(
        "invalid times",
        lambda: call(NR["utimensat"], -100, b"mine", struct.pack("=4q", 0, -1, 0, 1 << 62), 0),
        harmless=False,
    )
    if BAIT["network"] != "open":
        sock = socket.socket(socket.AF_UNIX)
        for size in (0, 1, 2, 3, 15, 110, 111, 128, 1 << 20, (1 << 32) - 1):
            attack(
                f"address of {size} bytes",
                lambda size=size: call(
                    NR["connect"], sock.fileno(), b"\2\0" + b"\377" * 200, ctypes.c_uint64(size)
                ),
                harmless=False,
            )
        attack(
            "address at 1",
            lambda: call(NR["connect"], sock.fileno(), ctypes.c_void_p(1), 16),
            harmless=False,
        )
        attack(
            "connect of a file",
            lambda: call(NR["connect"], 0, b"\2\0" + b"\0" * 14, 16),
            harmless=False,
        )
        attack(
            "unknown family",
            lambda: call(NR["connect"], sock.fileno(), b"\377\0" + b"\0" * 14, 16),
            harmless=False,
        )


def ordinary() -> None:
    control("write a file", lambda: Path("a.txt").write_text("x"))
    control(
        "chmod a file",
        lambda: (os.chmod("a.txt", 0o755), must(os.stat("a.txt").st_mode & 0o777 == 0o755)),
    )
    control(
        "fchmod a file",
        lambda: (
            os.fchmod(os.open("a.txt", 0), 0o700),
            must(os.stat("a.txt").st_mode & 0o777 == 0o700),
        ),
    )
    control("chmod in TMPDIR", lambda: os.chmod(tempfile.mkdtemp(), 0o755))
    control(
        "utime of a file", lambda: (os.utime("a.txt", (5, 5)), must(os.stat("a.txt").st_mtime == 5))
    )
    control(
        "utime in nanoseconds",
        lambda: (os.utime("a.txt", ns=(1, 3)), must(os.stat("a.txt").st_mtime_ns == 3)),
    )
    control(
        "utime of a link",
        lambda: (
            os.symlink("a.txt", "s"),
            os.utime("s", (9, 9), follow_symlinks=False),
            must(os.lstat("s").st_mtime == 9),
        ),
    )
    control(
        "rename, link, mkdir",
        lambda: (os.mkdir("d"), os.rename("a.txt", "d/b"), os.link("d/b", "c")),
    )
    control("temporary file", lambda: os.write(tempfile.mkstemp()[0], b"x"))
    control(
        "subprocess",
        lambda: must(subprocess.check_output("echo hi | tr a-z A-Z", shell=True) == b"HI\n"),
    )
    control("threads", lambda: concurrent.futures.ThreadPoolExecutor(2).submit(int, "1").result())
    control("asyncio", lambda: asyncio.run(asyncio.to_thread(int, "1")))
    control("devices", lambda: (Path("/dev/null").write_text("x"), os.urandom(4)))
    control("/proc/meminfo", lambda: Path("/proc/meminfo").read_text()[:20])
    control("processors", os.cpu_count)
    control("signal to a child", signal_child)
    control("signal to the own group", signal_group)
    control("signal to a thread", lambda: must(own_signal()))
    control("own limits", lambda: resource.setrlimit(resource.RLIMIT_CORE, (0, 0)))
    control(
        "venv",
        lambda: subprocess.check_output([sys.executable, "-m", "venv", "--without-pip", "v"]),
    )
    control("flock", lambda: fcntl.flock(os.open("c", os.O_RDWR), fcntl.LOCK_EX))
    if BAIT["network"] == "blocked":
        control("own unix socket", own_unix)
    if BAIT["allowed"]:
        control("allowed address", lambda: must(tcp(("127.0.0.1", BAIT["allowed"])) == b"hello"))
        control(
            "allowed, by asyncio",
            lambda: must(asyncio.run(by_asyncio(BAIT["allowed"])) == b"hello"),
        )
        control("many at once", lambda: many(BAIT["allowed"]))


def signal_child() -> Any:
    child = subprocess.Popen(["sleep", "60"])
    child.send_signal(signal.SIGTERM)
    return must(child.wait() == -signal.SIGTERM)


def signal_group() -> Any:
    child = subprocess.Popen(["sh", "-c", "sleep 60 & wait"], start_new_session=True)
    os.killpg(child.pid, signal.SIGTERM)
    return must(child.wait() == -signal.SIGTERM)


def own_signal() -> bool:
    seen = []
    signal.signal(signal.SIGUSR2, lambda *_: seen.append(1))
    signal.raise_signal(signal.SIGUSR2)
    signal.pthread_kill(threading.get_ident(), signal.SIGUSR2)
    os.kill(os.getpid(), signal.SIGUSR2)
    return len(seen) == 3


def own_unix() -> bytes:
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as near:
        listener.bind("own.sock")
        listener.listen(1)
        near.connect(os.path.abspath("own.sock"))
        far, _ = listener.accept()
        near.send(b"x")
        return must(far.recv(1))


async def by_asyncio(port: int) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    found = await reader.read(16)
    writer.close()
    return found


def many(port: int) -> int:
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        return must(sum(pool.map(lambda _: tcp(("127.0.0.1", port)) == b"hello", range(24))) == 24)


def passed() -> None:
    """Nothing but the standard streams is inherited: above all not the notification descriptor."""
    for fd in range(3, 256):
        with contextlib.suppress(OSError):
            os.fstat(fd)
            ROWS.append((f"descriptor {fd}", "OPEN", "inherited"))


passed()
files()
metadata()
processes()
network()
hostile_memory()
ordinary()
print(json.dumps(ROWS))
