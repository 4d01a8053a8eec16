"""Create a user and network namespace, pass its listeners to the parent, run a program in it.

This replaces the launcher in tests: it uses the same netlink messages and sockets. Arguments: the
descriptor of a unix socket, a resolv.conf to use inside, and the program with its arguments.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import sys

from union.sandbox._codecs.netlink import egress_setup

CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWNET = 0x20000, 0x10000000, 0x40000000
MS_BIND, MS_PRIVATE_REC = 0x1000, 0x44000
TRANSPARENT, HTTP, SOCKS = 12345, 3128, 1080

libc = ctypes.CDLL(None, use_errno=True)


def check(result):
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def send(step):
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, step.protocol) as sock:
        sock.bind((0, 0))
        sock.settimeout(5)
        sock.send(step.data)
        seen = 0
        while seen < step.acks:
            data = sock.recv(65536)
            while data:
                length, kind = struct.unpack_from("=IH", data)
                (error,) = struct.unpack_from("=i", data, 16)
                if kind != 2 or error:
                    raise OSError(-error, f"{step.description}: {os.strerror(-error)}")
                seen += 1
                data = data[(length + 3) & ~3 :]


def listening(family, address, kind=socket.SOCK_STREAM):
    sock = socket.socket(family, kind)
    sock.bind(address)
    if kind == socket.SOCK_STREAM:
        sock.listen(512)
    return sock


def main():
    control = socket.socket(fileno=int(sys.argv[1]))
    check(libc.unshare(CLONE_NEWUSER | CLONE_NEWNET | CLONE_NEWNS))
    check(libc.mount(b"none", b"/", None, MS_PRIVATE_REC, None))
    check(libc.mount(sys.argv[2].encode(), b"/etc/resolv.conf", None, MS_BIND, None))
    for step in egress_setup(TRANSPARENT):
        send(step)
    sockets = [
        listening(socket.AF_INET, ("127.0.0.1", TRANSPARENT)),
        listening(socket.AF_INET6, ("::1", TRANSPARENT)),
        listening(socket.AF_INET, ("127.0.0.53", 53), socket.SOCK_DGRAM),
        listening(socket.AF_INET, ("127.0.0.53", 53)),
        listening(socket.AF_INET, ("127.0.0.1", HTTP)),
        listening(socket.AF_INET, ("127.0.0.1", SOCKS)),
    ]
    socket.send_fds(control, [b"s"], [sock.fileno() for sock in sockets])
    for sock in sockets:
        sock.close()
    if control.recv(1) != b"g":
        raise SystemExit(3)
    control.close()
    os.execv(sys.argv[3], sys.argv[3:])


main()
