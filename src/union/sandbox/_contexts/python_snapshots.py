"""Save and restore the interpreter of a Python context: executed inside the sandbox, on demand.

A snapshot is a forked process that sleeps. To restore it, it forks again, and that process replaces
the present interpreter, whose process then ends. Each of these processes is adopted by the first
process of the sandbox, so that cells do not see it among their children. They exchange datagrams
over names in the network namespace of the sandbox: no descriptor has to be shared, and no signal
can reach a thread of a library. The driver executes the source of this file; it imports the
standard library only.
"""

import _thread
import contextlib
import json
import os
import signal
import socket
import sys
import time
from typing import Any

HAND_OVER_S = 20.0
POLL_S = 0.1
MAX_NAMES = 8
UNSAFE_MODULES = ("grpc", "jax", "polars", "ray", "tensorflow", "torch")


class NotSavableError(Exception):
    """The interpreter has something that cannot be saved."""


def perform(driver: Any, operation: str, head: dict[str, Any]) -> bytes | None:
    """Perform ``save``, ``restore`` or ``discard`` for the driver."""
    if operation == "discard":
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(head["name"]), signal.SIGKILL)
        return None
    if operation == "save":
        check_savable(driver)
    mailbox = open_mailbox()
    try:
        if operation == "restore":
            hand_over(driver, mailbox, int(head["name"]))
            return None
        if fork_orphan():
            pid, _ = answer_of(mailbox, "the snapshot did not start")
            return json.dumps({"pid": pid}).encode()
        sleep(mailbox.getsockname())
    finally:
        mailbox.close()
    raise globals()["Resumed"]


def open_mailbox(name: bytes = b"") -> socket.socket:
    """Return a socket for messages, with a name of its own.

    Each message has its own connection: not every sandbox has local datagrams.
    """
    mailbox = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    mailbox.bind(name)
    mailbox.listen(8)
    mailbox.settimeout(HAND_OVER_S)
    return mailbox


def name_of(pid: int) -> bytes:
    return b"\0union-sandbox-snapshot-%d" % pid


def send_to(mailbox: socket.socket, data: bytes, address: bytes) -> None:
    """Send a message, with the address of the mailbox for the answer."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sender:
        sender.settimeout(HAND_OVER_S)
        sender.connect(address)
        sender.send(data + b" " + mailbox.getsockname())


def receive_from(mailbox: socket.socket) -> tuple[bytes, bytes]:
    """Wait for a message; return its data and the address of its sender."""
    while True:
        connection, _ = mailbox.accept()
        with connection:
            connection.settimeout(HAND_OVER_S)
            with contextlib.suppress(OSError):  # of another program: it sends nothing
                data, _, sender = connection.recv(256).partition(b" ")
                if sender:
                    return data, sender


def answer_of(mailbox: socket.socket, why: str) -> tuple[int, bytes]:
    """Wait for a message; return the process that it names, and the address of its sender."""
    try:
        data, sender = receive_from(mailbox)
    except TimeoutError:
        raise RuntimeError(why) from None
    return int(data), sender


def sleep(saver: bytes) -> None:
    """Be the snapshot; return in each process that is restored from it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt goes to the whole group
    try:
        own = open_mailbox(name_of(os.getpid()))
        own.settimeout(None)
        send_to(own, b"%d" % os.getpid(), saver)
        while True:
            _, replaced = receive_from(own)
            try:
                is_snapshot = fork_orphan()
            except OSError:
                continue  # the present interpreter reports that nothing answered
            if not is_snapshot:
                break
        own.close()
        with contextlib.closing(open_mailbox()) as mailbox:
            send_to(mailbox, b"%d" % os.getpid(), replaced)
            receive_from(mailbox)
    except BaseException:  # noqa: BLE001 - another interpreter continues, so this process must not
        os._exit(1)


def hand_over(driver: Any, mailbox: socket.socket, snapshot: int) -> None:
    """Let the host follow a process that the snapshot starts; it takes over after this cell."""
    mailbox.settimeout(POLL_S)
    end = time.monotonic() + HAND_OVER_S
    answer = None
    try:
        send_to(mailbox, b"wake", name_of(snapshot))
        while answer is None:
            try:
                answer = answer_of(mailbox, "the snapshot could not start a process")
            except RuntimeError:
                os.kill(snapshot, 0)  # raises if it has ended meanwhile
                if time.monotonic() > end:
                    raise
    except OSError as exc:
        raise RuntimeError(f"the snapshot has ended: {exc.strerror}") from None
    successor, address = answer
    driver.send({"t": "restored", "n": driver.number, "pid": successor})
    driver.receive()  # sent when the host follows the new process
    driver.successor = address


def fork_orphan() -> bool:
    """Fork a process that the first process of the sandbox adopts; return False in it."""
    middle = os.fork()
    if middle:
        _, status = os.waitpid(middle, 0)
        if status:
            raise OSError(os.waitstatus_to_exitcode(status), "cannot start another process")
        return True
    try:
        child = os.fork()
    except OSError as exc:
        os._exit(min(exc.errno or 1, 255))
    if child:
        os._exit(0)
    return False


def check_savable(driver: Any) -> None:
    """Raise if the process has anything that a forked copy would not have, or would share."""
    found = [
        f"{what}: {', '.join(names[:MAX_NAMES])}"
        for what, names in (
            ("threads", threads()),
            ("asyncio tasks", tasks(driver)),
            ("modules with threads of their own", unsafe_modules()),
            ("child processes", children()),
            *descriptors(driver.sock.fileno()).items(),
        )
        if names
    ]
    if found:
        raise NotSavableError("; ".join(found))


def threads() -> list[str]:
    """Return the names of all threads of Python but this one."""
    threading = sys.modules.get("threading")
    named = {} if threading is None else {t.ident: t.name for t in threading.enumerate()}
    found = [name for ident, name in named.items() if ident != _thread.get_ident()]
    # Threads that were started without ``threading`` have no name.
    return found + ["unnamed"] * (thread_states() - 1 - len(found))


def thread_states() -> int:
    """Return how many threads Python has, with those that have not begun to run yet.

    ``_thread._count()`` omits a thread until it has had the lock of the interpreter.
    """
    import ctypes

    api = ctypes.PyDLL(None)
    for name in ("PyInterpreterState_Get", "PyInterpreterState_ThreadHead", "PyThreadState_Next"):
        getattr(api, name).restype = ctypes.c_void_p
    state = api.PyInterpreterState_ThreadHead(ctypes.c_void_p(api.PyInterpreterState_Get()))
    count = 0
    while state:
        count += 1
        state = api.PyThreadState_Next(ctypes.c_void_p(state))
    return count


def tasks(driver: Any) -> list[str]:
    """Return the tasks on the event loop; without any, close it: the next cell makes a new one."""
    if driver.loop is None or driver.loop.is_closed():
        return []
    found = [task.get_name() for task in sys.modules["asyncio"].all_tasks(driver.loop)]
    if not found:
        driver.loop.close()
        driver.loop = None
    return found


def unsafe_modules() -> list[str]:
    """Return loaded modules that are known to hang in a forked process."""
    return [name for name in UNSAFE_MODULES if name in sys.modules]


def descriptors(own: int) -> dict[str, list[str]]:
    """Return the open descriptors whose state a forked process would share."""
    kinds = {"socket": "sockets", "pipe": "pipes", "anon_inode": "kernel objects"}
    found: dict[str, list[str]] = {name: [] for name in kinds.values()}
    for fd in os.listdir("/proc/self/fd"):
        try:
            kind = os.readlink(f"/proc/self/fd/{fd}").partition(":")[0]
        except OSError:
            continue
        if kind in kinds and int(fd) > 2 and int(fd) != own:
            found[kinds[kind]].append(f"descriptor {fd}")
    return found


def children() -> list[str]:
    """Return the names of the child processes."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            try:
                with open(f"/proc/{entry}/stat", encoding="utf-8", errors="replace") as stat:
                    name, _, rest = stat.read().rpartition(")")
            except OSError:
                continue
            if rest.split()[1] == str(os.getpid()):
                found.append(f"{name.partition('(')[2]} ({entry})")
    return found
