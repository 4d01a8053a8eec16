"""Stands for macOS's sandbox-exec in tests on Linux.

It takes the same command line, reads the profile strictly (``sbpl``), dies as programs die on macOS
where the profile lacks what the loader needs, and has Linux enforce what it can: files by Landlock,
TCP by Landlock or an empty network namespace, signals by Landlock's scopes.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))

from sbpl import Policy, ProfileError

_USAGE, _DATA, _OS = 64, 65, 71
_NEEDED = {
    "the loader reads the root directory": ("file-read-data", "/"),
    "every program is linked with libSystem": ("file-read-data", "/usr/lib/libSystem.B.dylib"),
    "frameworks are there": ("file-read-data", "/System/Library/Frameworks/x"),
    "the loader's cache, since macOS 13": ("file-read-data", "/System/Cryptexes/OS/x"),
    "libraries are mapped": ("file-map-executable", "/usr/lib/libSystem.B.dylib"),
    "/bin/sh asks which shell it is": ("file-read-data", "/private/var/select/sh"),
}
_LINUX = (
    "/lib",
    "/lib64",
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/alternatives",
    "/etc/localtime",
)
_libc = ctypes.CDLL(None, use_errno=True)
_READ = 1 | 4 | 8  # execute, read a file, read a directory
_ALL = (1 << 16) - 1
_ON_FILES = 1 | 2 | 4 | 1 << 14 | 1 << 15
_TCP_BIND, _TCP_CONNECT = 1, 2
_NEW_NET = 0x40000000


class _Ruleset(ctypes.Structure):
    _fields_ = (("fs", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("access", ctypes.c_uint64), ("fd", ctypes.c_int32))


class _Port(ctypes.Structure):
    _fields_ = (("access", ctypes.c_uint64), ("port", ctypes.c_uint64))


def _call(number: int, *arguments: object) -> int:
    done = _libc.syscall(ctypes.c_long(number), *arguments)
    if done < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return done


def _arguments(argv: list[str]) -> tuple[str, dict[str, str], list[str]]:
    profile, given, at = None, {}, 1
    while at < len(argv):
        word = argv[at]
        if word == "--":
            at += 1
            break
        if word in {"-f", "-p", "-D"}:
            value, at = argv[at + 1], at + 2
        elif word[:2] in {"-f", "-p", "-D"}:
            value, at = word[2:], at + 1
        else:
            break
        if word[:2] == "-f":
            profile = Path(value).read_text(encoding="utf-8")
        elif word[:2] == "-p":
            profile = value
        else:
            name, equals, rest = value.partition("=")
            if not equals:
                raise ProfileError(f"not key=value: {value}")
            given[name] = rest
    if profile is None or not argv[at:]:
        sys.stderr.write("Usage: sandbox-exec [options] command [args]\n")
        raise SystemExit(_USAGE)
    return profile, given, argv[at:]


def _enforce(policy: Policy) -> None:
    ports = policy.ports()
    rules = _Ruleset(fs=_ALL, net=0 if ports is None else _TCP_BIND | _TCP_CONNECT, scoped=3)
    fd = _call(444, ctypes.byref(rules), ctypes.c_size_t(ctypes.sizeof(rules)), 0)
    for kind, path in policy.granted("file-read-data"):
        _beneath(fd, path, _READ, deep=kind == "subpath")
    for path in _LINUX:
        _beneath(fd, path, _READ, deep=True)
    for kind, path in policy.granted("file-write-data"):
        deep = kind == "subpath" and policy.allows("file-write-create", path=f"{path}/x")
        _beneath(fd, path, _ALL if deep else 2 | 4 | 1 << 15, deep=deep)
    if policy.allows("pseudo-tty"):
        for path in ("/dev/ptmx", "/dev/pts", "/dev/tty"):
            _beneath(fd, path, 2 | 4 | 8 | 1 << 15, deep=True)
    if policy.allows("ipc-posix-sem-create"):
        _beneath(fd, "/dev/shm", _ALL, deep=True)  # where Linux keeps them
    for port in ports or ():
        rule = _Port(access=_TCP_CONNECT, port=port)
        _call(445, fd, 2, ctypes.byref(rule), 0)
    if ports == []:
        _libc.unshare(_NEW_NET)  # also what is not TCP; where that is refused, Landlock is left
    _libc.prctl(38, 1, 0, 0, 0)
    _call(446, fd, 0)
    os.close(fd)


def _beneath(ruleset: int, path: str, access: int, *, deep: bool) -> None:
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # a name of macOS's
    try:
        if not os.path.isdir(path):
            access &= _ON_FILES
        elif not deep:
            access &= 8  # the names in it, and with Landlock also below; there is no less
            if path == "/":
                return
        if not access:
            return
        rule = _Beneath(access=access, fd=fd)
        _call(445, ruleset, 1, ctypes.byref(rule), 0)
    finally:
        os.close(fd)


def main(*, nested: bool = False, without: tuple[str, ...] = ()) -> None:
    """Run a command under a profile, as far as Linux can enforce it."""
    try:
        text, given, command = _arguments(sys.argv)
        policy = Policy(text, given, without=frozenset(without))
    except ProfileError as exc:
        sys.stderr.write(f"sandbox-exec: <input string>: {exc}\n")
        raise SystemExit(_DATA) from None
    if nested:
        sys.stderr.write("sandbox-exec: sandbox_apply: Operation not permitted\n")
        raise SystemExit(_OS)
    if not policy.allows("process-exec*"):
        sys.stderr.write(
            f"sandbox-exec: execvp() of '{command[0]}' failed: Operation not permitted\n"
        )
        raise SystemExit(_OS)
    for operation, path in _NEEDED.values():
        if not policy.allows(operation, path=path):
            os.abort()  # without a message, as the loader does
    _enforce(policy)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and that is inherited
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as exc:
        sys.stderr.write(f"sandbox-exec: execvp() of '{command[0]}' failed: {exc.strerror}\n")
        raise SystemExit(_OS) from None
