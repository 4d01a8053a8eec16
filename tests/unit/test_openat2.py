from __future__ import annotations

import errno
import os

import pytest

from union.sandbox._linux import openat2 as beneath


@pytest.fixture(autouse=True)
def no_descriptor_is_left():
    before = sorted(os.listdir("/proc/self/fd"))
    yield
    assert sorted(os.listdir("/proc/self/fd")) == before


def open_as_in_gvisor(path, flags, mode=0o777, *, dir_fd=None):
    """A kernel that ignores O_NOFOLLOW when it opens a directory, unless with O_PATH."""
    if flags & os.O_DIRECTORY and not flags & os.O_PATH:
        flags &= ~os.O_NOFOLLOW
    return OPEN(path, flags, mode, dir_fd=dir_fd)


OPEN = os.open


@pytest.fixture(params=["openat2", "walk", "walk in gVisor"])
def root(request, tmp_path, monkeypatch):
    if request.param.startswith("walk"):
        monkeypatch.setattr(beneath, "has_openat2", lambda: False)
        if request.param == "walk in gVisor":
            monkeypatch.setattr(os, "open", open_as_in_gvisor)
    elif not beneath.has_openat2():
        pytest.skip("needs Linux 5.6 or later, and a container that allows openat2")
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "f").write_bytes(b"x")
    os.symlink("a", tmp_path / "dirlink")
    os.symlink("a/b/f", tmp_path / "filelink")
    os.symlink("/proc/self/cwd", tmp_path / "magic")
    fd = os.open(tmp_path, os.O_PATH | os.O_DIRECTORY)
    yield fd
    os.close(fd)


@pytest.mark.parametrize("path", [b"a/b/f", b"./a//b/./f"])
def test_opens_below_and_closes_on_exec(root, path):
    fd = beneath.open_beneath(root, path, flags=os.O_RDONLY)
    assert os.read(fd, 2) == b"x"
    assert not os.get_inheritable(fd)
    os.close(fd)


def test_the_simulated_kernel_follows_links(root, monkeypatch):
    """The control of the attack: the flags alone do not refuse a link there."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    os.close(open_as_in_gvisor(b"dirlink", flags, dir_fd=root))
    with pytest.raises(OSError):
        OPEN(b"dirlink", flags, dir_fd=root)


def test_dot_is_the_directory_itself(root):
    fd = beneath.open_beneath(root, b".", flags=os.O_RDONLY | os.O_DIRECTORY)
    assert os.path.samestat(os.fstat(fd), os.fstat(root))
    os.close(fd)


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_PATH, os.O_PATH | os.O_NOFOLLOW])
@pytest.mark.parametrize("path", [b"dirlink", b"dirlink/b/f", b"filelink", b"magic", b"magic/x"])
@pytest.mark.parametrize("directory", [0, os.O_DIRECTORY])
def test_links_are_told_from_everything_else(root, flags, path, directory):
    with pytest.raises(OSError, match="symbolic links") as info:
        beneath.open_beneath(root, path, flags=flags | directory)
    assert info.value.errno == errno.ELOOP


@pytest.mark.parametrize("path", [b"..", b"a/..", b"a/../..", b"/", b"/etc/passwd", b"a/b/../f"])
def test_ways_out_are_refused(root, path):
    with pytest.raises(OSError, match="cross-device") as info:
        beneath.open_beneath(root, path, flags=os.O_PATH)
    assert info.value.errno == errno.EXDEV


@pytest.mark.parametrize(
    "path,number",
    [
        (b"none", errno.ENOENT),
        (b"none/f", errno.ENOENT),
        (b"a/b/f/g", errno.ENOTDIR),
        (b"x" * 256, errno.ENAMETOOLONG),
    ],
)
def test_the_two_ways_agree_on_the_error(root, path, number):
    with pytest.raises(OSError) as info:
        beneath.open_beneath(root, path, flags=os.O_RDONLY)
    assert info.value.errno == number


def test_another_mount_is_refused_on_request():
    fd = os.open("/", os.O_PATH | os.O_DIRECTORY)
    try:
        os.close(beneath.open_beneath(fd, b"proc", flags=os.O_PATH))
        with pytest.raises(OSError, match="cross-device"):
            beneath.open_beneath(fd, b"proc", flags=os.O_PATH, same_mount=True)
    finally:
        os.close(fd)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EPERM])
def test_a_kernel_without_openat2_is_noticed(monkeypatch, number):
    def refuse(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(beneath, "_openat2", refuse)
    assert beneath.has_openat2.__wrapped__() is False


def test_a_tree_that_never_holds_still_ends_the_tries(monkeypatch, tmp_path):
    calls = []

    class Libc:
        @staticmethod
        def syscall(*args):
            calls.append(args)
            beneath.ctypes.set_errno(errno.EAGAIN)
            return -1

    monkeypatch.setattr(beneath, "_libc", Libc)
    with pytest.raises(BlockingIOError):
        beneath._openat2(0, b"f", flags=os.O_PATH, mode=0, resolve=0)
    assert 1 < len(calls) < 1000
