"""Run by test_seccomp in a process of its own: install a filter, try things, print what happened.

Reads ``{"program": hex or "", "numbers": {name: number}}``; prints name to outcome, as JSON. Each
refused call has arguments that would do no harm if the filter let it through, even for root.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import ctypes
import errno
import json
import mmap
import multiprocessing
import os
import platform
import select
import signal
import socket
import sqlite3
import ssl
import stat
import subprocess
import sys
import tempfile
import threading
import time

LIBC = ctypes.CDLL(None, use_errno=True)
BAD = 1  # a pointer that faults


class Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))


def install(program: bytes) -> None:
    zero = ctypes.c_ulong(0)
    if LIBC.prctl(38, ctypes.c_ulong(1), zero, zero, zero) != 0:
        raise OSError(ctypes.get_errno(), "no_new_privs")
    wanted = Filter(len(program) // 8, program)
    if LIBC.prctl(22, ctypes.c_ulong(2), ctypes.byref(wanted), zero, zero) != 0:
        raise OSError(ctypes.get_errno(), "filter")


def raw(number: int, *args: int) -> str:
    ctypes.set_errno(0)
    result = LIBC.syscall(ctypes.c_long(number), *(ctypes.c_ulong(arg) for arg in args))
    return "ok" if result != -1 else errno.errorcode[ctypes.get_errno()]


def refused_calls(number: dict[str, int]) -> dict[str, tuple[int, ...]]:
    top = 0xABCD_0000_0000
    return {
        "mount": (number["mount"], BAD, BAD, BAD, 0, 0),
        "chroot": (number["chroot"], BAD),
        "fsopen": (number["fsopen"], BAD, 0),
        "open_tree": (number["open_tree"], 0, BAD, 0),
        "open_tree_attr": (number["open_tree_attr"], 0, BAD, 0, 0, 0),
        "mount_setattr": (number["mount_setattr"], 0, BAD, 0, 0, 0),
        "setns": (number["setns"], 2**32 - 1, 0),
        "clone3": (number["clone3"], 0, 0),
        "clone new user": (number["clone"], 0x1000_0000 | 0x1_0000, 0, 0, 0, 0),
        "unshare user": (number["unshare"], 0x1000_0000 | 0x8000_0000),
        "unshare time": (number["unshare"], 0x80 | 0x8000_0000),
        "ptrace": (number["ptrace"], 9999, 0, 0, 0),
        "process_vm_readv": (number["process_vm_readv"], 0, 0, 0, 0, 0, 0),
        "pidfd_getfd": (number["pidfd_getfd"], 2**32 - 1, 0, 0),
        "bpf": (number["bpf"], 9999, 0, 0),
        "perf_event_open": (number["perf_event_open"], BAD, 0, 0, 0, 0),
        "userfaultfd": (number["userfaultfd"], 0xFFFF_FFF0),
        "io_uring_setup": (number["io_uring_setup"], 0, BAD),
        "io_uring_enter": (number["io_uring_enter"], 2**32 - 1, 0, 0, 0, 0, 0),
        "keyctl": (number["keyctl"], 9999, 0, 0, 0, 0),
        "add_key": (number["add_key"], BAD, BAD, 0, 0, 0),
        "finit_module": (number["finit_module"], 2**32 - 1, BAD, 0),
        "reboot": (number["reboot"], 0, 0, 0, 0),
        "swapon": (number["swapon"], BAD, 0),
        "clock_settime": (number["clock_settime"], 0, BAD),
        "sethostname": (number["sethostname"], BAD, 2**31),
        "name_to_handle_at": (number["name_to_handle_at"], 0, BAD, BAD, BAD, 0),
        "open_by_handle_at": (number["open_by_handle_at"], 0, BAD, 0),
        "fanotify_init": (number["fanotify_init"], 0xFFFF_FFFF, 0),
        "personality": (number["personality"], 0x0040_0000),
        "TIOCSTI": (number["ioctl"], 0, 0x5412, BAD),
        "TIOCSTI with high bits": (number["ioctl"], 0, top | 0x5412, BAD),
        "TIOCLINUX": (number["ioctl"], 0, 0x541C, BAD),
        "socket packet": (number["socket"], 17, 3, 0),
        "socket alg": (number["socket"], 38, 5, 0),
        "socket alg with high bits": (number["socket"], top | 38, 5, 0),
        "socket vsock": (number["socket"], 40, 1, 0),
        "socket raw": (number["socket"], 2, 3, 1),
        "socket netfilter": (number["socket"], 16, 3, 12),
        "socket mptcp": (number["socket"], 2, 1, 262),
        "openat2": (number["openat2"], 0, BAD, BAD, 0),
        "newer than the table": (470, 0, 0, 0),
        "x32 getpid": (0x4000_0000 | 39,),
    }


def expecting(kind: type[Exception], call, *args) -> str:
    try:
        call(*args)
    except kind as exc:
        return errno.errorcode[exc.errno] if isinstance(exc, OSError) else "refused"
    return "ok"


def set_id_attempts(directory: str) -> dict[str, str]:
    plain = os.path.join(directory, "plain")
    with open(plain, "w", encoding="ascii"):
        pass
    descriptor = os.open(plain, os.O_RDWR)
    made = {
        "chmod 4755": expecting(OSError, os.chmod, plain, 0o4755),
        "fchmod 2755": expecting(OSError, os.fchmod, descriptor, 0o2755),
        "create 4755": expecting(OSError, os.open, plain + "1", os.O_CREAT | os.O_RDWR, 0o4755),
        "tmpfile 4755": expecting(OSError, os.open, directory, os.O_TMPFILE | os.O_RDWR, 0o4755),
        "mkdir 2755": expecting(OSError, os.mkdir, plain + "2", 0o2755),
        "mknod 4755": expecting(OSError, os.mknod, plain + "3", stat.S_IFREG | 0o4755),
        "mknod null": expecting(
            OSError, os.mknod, plain + "4", stat.S_IFCHR | 0o600, os.makedev(1, 3)
        ),
    }
    os.close(descriptor)
    return made


def i386_getpid() -> str:
    """``mov eax, 20; int 0x80; ret`` in a child, which a kernel without the gate would kill."""
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(b"\xb8\x14\x00\x00\x00\xcd\x80\xc3")
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    pid = os.fork()
    if pid == 0:
        result = ctypes.CFUNCTYPE(ctypes.c_int)(address)()
        os._exit(0 if result == os.getpid() else -result if -100 < result < 0 else 101)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status < 0:
        return "killed"
    return "ok" if status == 0 else errno.errorcode.get(status, str(status))


def double(value: int) -> int:
    return 2 * value


def loopback(family: int, address: str) -> None:
    with socket.socket(family, socket.SOCK_STREAM) as server:
        server.bind((address, 0))
        server.listen()
        with socket.create_connection(server.getsockname()[:2], timeout=5) as client:
            peer, _ = server.accept()
            with peer:
                client.sendall(b"over")
                assert peer.recv(4) == b"over"


def datagrams() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))
        server.settimeout(5)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_UDP) as client:
            client.sendto(b"x", server.getsockname())
        assert server.recv(1) == b"x"


def pool(method: str) -> None:
    context = multiprocessing.get_context(method)
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as workers:
        assert workers.submit(double, 4).result(timeout=30) == 8


def threads() -> None:
    seen: list[int] = []
    started = [threading.Thread(target=seen.append, args=(n,)) for n in range(8)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    assert sorted(seen) == list(range(8))


async def loop() -> None:
    process = await asyncio.create_subprocess_exec("cat", stdin=-1, stdout=-1)
    out, _ = await process.communicate(b"through")
    assert out == b"through"
    assert await asyncio.to_thread(double, 3) == 6


def signals() -> None:
    seen: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _: seen.append(number))
    signal.raise_signal(signal.SIGUSR1)
    assert seen == [signal.SIGUSR1]
    signal.setitimer(signal.ITIMER_REAL, 0.001)
    signal.sigwait([signal.SIGALRM])


def mapping() -> None:
    with tempfile.TemporaryFile() as file:
        file.truncate(4096)
        with mmap.mmap(file.fileno(), 4096) as memory:
            memory[:2] = b"ok"
            assert memory[:2] == b"ok"


def database(directory: str) -> None:
    connection = sqlite3.connect(os.path.join(directory, "db"))
    connection.execute("pragma journal_mode=wal")
    connection.execute("create table t (a)")
    connection.commit()
    connection.close()


def modes(directory: str) -> None:
    path = os.path.join(directory, "mode")
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o640))
    os.chmod(path, 0o755)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o755
    os.mkdir(path + ".d", 0o1777)
    os.mkfifo(path + ".fifo")


def waiting() -> None:
    left, right = socket.socketpair()
    with left, right, select.epoll() as poller:
        poller.register(left)
        right.send(b"x")
        assert poller.poll(5)
        assert select.select([left], [], [], 5)[0]


def shell() -> None:
    command = "echo a | tr a b; umask 022; cd /; exit 3"
    done = subprocess.run(["sh", "-c", command], capture_output=True, check=False, timeout=20)
    assert (done.stdout, done.returncode) == (b"b\n", 3)


def terminal() -> None:
    leader, follower = os.openpty()
    assert os.get_terminal_size(follower).columns >= 0
    assert os.isatty(follower)
    os.close(leader)
    os.close(follower)


def everyday(directory: str) -> dict[str, str]:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    calls = {
        "threads": threads,
        "fork pool": lambda: pool("fork"),
        "spawn pool": lambda: pool("spawn"),
        "tcp": lambda: loopback(socket.AF_INET, "127.0.0.1"),
        "udp": datagrams,
        "names": lambda: socket.getaddrinfo("localhost", 80),
        "interfaces": socket.if_nameindex,
        "route netlink": lambda: socket.socket(16, socket.SOCK_RAW, 0).close(),
        "asyncio": lambda: asyncio.run(loop()),
        "shell": shell,
        "mmap": mapping,
        "sqlite": lambda: database(directory),
        "tls context": ssl.create_default_context,
        "modes": lambda: modes(directory),
        "epoll and select": waiting,
        "signals": signals,
        "clock": lambda: (time.clock_gettime(time.CLOCK_REALTIME), time.sleep(0.001)),
        "memfd": lambda: os.close(os.memfd_create("x")),
        "pidfd": lambda: os.close(os.pidfd_open(os.getpid())),
        "terminal": terminal,
    }
    outcome = {}
    for name, call in calls.items():
        try:
            call()
        except Exception as exc:  # noqa: BLE001 - the outcome is the report
            outcome[name] = repr(exc)
        else:
            outcome[name] = "ok"
    return outcome


def main() -> None:
    asked = json.load(sys.stdin)
    with tempfile.TemporaryDirectory() as directory:
        if asked["program"]:
            install(bytes.fromhex(asked["program"]))
            refused = {name: raw(*call) for name, call in refused_calls(asked["numbers"]).items()}
            in_thread: list[str] = []
            thread = threading.Thread(
                target=lambda: in_thread.append(raw(asked["numbers"]["unshare"], 0x9000_0000))
            )
            thread.start()
            thread.join()
            refused["unshare from a thread"] = in_thread[0]
        else:
            refused = {}
        refused |= set_id_attempts(directory)
        if platform.machine() == "x86_64":
            refused["int 0x80"] = i386_getpid()
        print(json.dumps({"refused": refused, "everyday": everyday(directory)}))


if __name__ == "__main__":
    main()
