"""What a caller writes: paths, endpoints, sizes; and a tree that someone hostile has prepared."""

from __future__ import annotations

import atexit
import contextlib
import functools
import ipaddress
import os
import shutil
import tempfile
from urllib.parse import urlsplit

from union.sandbox._core.paths import work_path
from union.sandbox._core.resources import Resources, limits_from
from union.sandbox._linux.openat2 import open_beneath
from union.sandbox._policy.upstream import parse_upstream
from union.sandbox._wire.endpoint import parse_endpoint, parse_fingerprint
from union.sandbox.errors import PolicyError, SandboxUsageError

WORK_DIRS = ("/tmp/work", "/", "/a//b/./c/")
MOST = 2**63


@functools.cache
def tree() -> tuple[str, int]:
    """A work dir with ways out of it, next to a file that must not be read."""
    base = os.path.realpath(tempfile.mkdtemp(prefix="sbx-fuzz-"))
    atexit.register(shutil.rmtree, base, ignore_errors=True)
    work = os.path.join(base, "work")
    os.makedirs(os.path.join(work, "d", "e"))
    for name in ("f", "d/f", "d/e/f", "../secret"):
        with open(os.path.join(work, name), "w", encoding="ascii") as file:
            file.write(name)
    for name, target in {
        "up": "..", "out": "../secret", "abs": base, "root": "/", "self": ".", "d/up": "../..",
        "loop": "loop", "d/in": "e", "proc": "/proc/self/root", "d/e/x": "../../../secret",
    }.items():  # fmt: skip
        os.symlink(target, os.path.join(work, name))
    return work, os.open(work, os.O_RDONLY | os.O_DIRECTORY)


def paths(data: bytes) -> None:
    """A path that is accepted is below the work dir, in words and in the kernel's view."""
    text = data.decode("utf-8", "surrogateescape")
    for work_dir in WORK_DIRS:
        for given in (text, data):
            try:
                found = work_path(given, work_dir=work_dir, allow_root=True)
            except SandboxUsageError:
                continue
            names = found.split("/")
            assert ".." not in names
            assert "" not in names
            assert "\0" not in found
            assert work_path(found, work_dir=work_dir, allow_root=True) == found
            root = os.path.normpath(work_dir)
            whole = os.path.normpath(os.path.join(root, found))
            assert whole == root or whole.startswith(root.rstrip("/") + "/")
    work, fd = tree()
    with contextlib.suppress(SandboxUsageError, OSError):
        found = work_path(data, work_dir=work, allow_root=True)
        opened = open_beneath(fd, os.fsencode(found), flags=os.O_PATH)
        try:
            where = os.readlink(f"/proc/self/fd/{opened}")
        finally:
            os.close(opened)
        assert where == work or where.startswith(work + "/")


def endpoint(data: bytes) -> None:
    """What is accepted says the same when it is read again, and is known to be safe or not."""
    text = data.decode("utf-8", "surrogateescape")
    try:
        found = parse_endpoint(text)
    except SandboxUsageError as exc:
        assert exc.argument == "endpoint"  # noqa: PT017 - a target, not a test
    else:
        assert parse_endpoint(str(found)).base == found.base
        assert parse_endpoint(str(found)).socket == found.socket
        assert found.fingerprint is None or len(found.fingerprint) == 32
        assert all(c.isprintable() and c != " " for c in found.base)
        assert "\0" not in (found.socket or "")
        if found.is_secure and found.socket is None and found.base.startswith("http:"):
            host = urlsplit(found.base).hostname or ""
            assert host == "localhost" or ipaddress.ip_address(host).is_loopback
    with contextlib.suppress(SandboxUsageError):
        assert len(parse_fingerprint(text, argument="cert")) == 32
    with contextlib.suppress(PolicyError):
        upstream = parse_upstream(text, argument="network_proxy_url")
        assert upstream.host
        assert 0 <= upstream.port <= 65535


def sizes(data: bytes) -> None:
    """Amounts, as text and as numbers: every accepted one is a value for the kernel."""
    text = data[:64].decode("utf-8", "surrogateescape")
    values: list[object] = [text, (1, text)]
    with contextlib.suppress(ValueError):
        values += [int(text), float(text)]
    for value in values:
        for name in (
            "cpu", "memory", "processes", "session_processes", "open_files", "file_size", "tmp",
            "shm", "gpu",
        ):  # fmt: skip
            try:
                limits = limits_from(Resources(**{name: value}))
            except SandboxUsageError as exc:
                assert exc.argument == "resources"  # noqa: PT017 - a target, not a test
                continue
            assert limits.cpus is None or 0 < limits.cpus < MOST
            for amount in (
                limits.memory_bytes or 1,
                limits.processes,
                limits.session_processes,
                limits.open_files,
                limits.file_size_bytes,
                limits.tmp_bytes,
                limits.shm_bytes,
                limits.gpus + 1,
            ):
                assert 0 < amount < MOST
