"""Attacks by links in the work dir on paths that the host resolves or inspects there."""

from __future__ import annotations

import ctypes
import os
import stat
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.conftest import RACE
from tests.escape.plants import SECRET

from union import sandbox as sb
from union.sandbox._linux.tree import WorkTree
from union.sandbox.constants import CA_VARIABLES

if TYPE_CHECKING:
    from tests.conftest import OpenSession


@pytest.fixture
def certificates(work: str) -> Path:
    """A directory of certificates in the work dir, as a project may have one."""
    path = Path(work, "tls", "certs")
    path.mkdir(parents=True)
    (path / "ca.pem").write_text("certificate")
    return path


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in CA_VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.threat(134)
@pytest.mark.spec("C5")
@pytest.mark.parametrize("variable", CA_VARIABLES)
async def test_a_variable_that_names_a_link_in_the_work_dir_is_refused(
    jailed: OpenSession,
    plant: Path,
    certificates: Path,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
) -> None:
    """The file itself, a directory above it, or a link of the caller that leads there."""
    work = str(certificates.parent.parent)
    file = certificates / "ca.pem"
    (plant.parent / "own").symlink_to(certificates)
    (certificates / "mine").symlink_to("ca.pem")
    for named in (file, plant.parent / "own" / "ca.pem", certificates):
        monkeypatch.setenv(variable, str(named))
        async with jailed(host_work_dir=work) as jail:
            shown = await jail.exec(
                f"cat {file}; echo x > tls/certs/ca.pem; mv tls x; printenv {variable}"
            )
            assert shown.stdout == f"certificate{named}\n"
            assert file.read_text() == "certificate", "it is read-only in the work dir as well"
    async with jailed(host_work_dir=work) as jail:
        # Nothing is protected for a session that began before the variable was set.
        monkeypatch.delenv(variable)
        async with jailed(host_work_dir=work) as other:
            assert (
                await other.exec(f"mv tls/certs tls/x; ln -s {plant} tls/certs")
            ).returncode == 0
    (plant / "ca.pem").write_text(SECRET)
    assert file.read_text() == SECRET, "the control: the link leads out"
    for named in (file, certificates, plant.parent / "own" / "ca.pem"):
        monkeypatch.setenv(variable, str(named))
        with pytest.raises(sb.PolicyError, match=variable) as caught:
            await jailed(host_work_dir=work).open()
        assert caught.value.argument == variable
        assert "link" in str(caught.value)


_FLIP = """
import ctypes, os, time
libc = ctypes.CDLL(None)
print("flipping", flush=True)
end = time.monotonic() + 20
while time.monotonic() < end:
    libc.renameat2(-100, b"tls/certs", -100, b"link", 2)
    time.sleep(0.002)
"""


@pytest.mark.threat(5, 134)
async def test_a_variable_cannot_be_raced(
    jailed: OpenSession, plant: Path, work: str, certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One session exchanges the directory for a link while others are opened in the work dir."""
    Path(work, "link").symlink_to(plant)
    for path in (Path(work), certificates, certificates.parent):
        path.chmod(0o777)
    seen: Counter[str] = Counter()
    async with jailed(host_work_dir=work) as one:
        proc = await one.run(_FLIP, script_type="python", stdout=True)
        assert await anext(proc.iter_stdout_lines()) == "flipping"
        monkeypatch.setenv("SSL_CERT_DIR", str(certificates))
        end = time.monotonic() + RACE
        while time.monotonic() < end or not seen["refused"]:
            assert time.monotonic() < end + 15, seen
            try:
                async with jailed(host_work_dir=work) as two:
                    found = await two.exec("cat tls/certs/secret link/secret")
                    assert SECRET not in found.stdout
                    seen["shown"] += 1
            except sb.SandboxError:
                seen["refused"] += 1
        proc.kill()
    assert (plant / "secret").read_text() == SECRET


# The look at the venv before each command.


def _version() -> str:
    return f"python{sys.version_info[0]}.{sys.version_info[1]}"


@pytest.mark.threat(135)
@pytest.mark.spec("B5")
async def test_a_linked_directory_of_the_venv_is_not_followed(
    jailed: OpenSession, plant: Path, work: str
) -> None:
    """The host detects and repairs the change; the target of the link is not touched."""
    (plant / _version()).mkdir()
    os.utime(plant / _version(), (1, 1))
    before = (plant / _version()).stat()
    async with jailed(host_work_dir=work) as jail:
        await jail.run_code("pass")
        moved = await jail.exec(
            f"mv .sandbox-venv/lib .sandbox-venv/x; ln -s {plant} .sandbox-venv/lib"
        )
        assert moved.returncode == 0
        tree = WorkTree(work)
        try:
            name = f".sandbox-venv/lib/{_version()}"
            assert os.stat(f"{work}/{name}").st_ino == before.st_ino, "the control"
            assert tree.fingerprint((name,)) is None
            assert tree.fingerprint((".sandbox-venv/lib",)) is not None
        finally:
            tree.close()
        assert await jail.run_code("print('mended')") == "mended\n"
        assert stat.S_ISDIR(os.lstat(f"{work}/.sandbox-venv/lib").st_mode)
    after = (plant / _version()).stat()
    assert (after.st_mtime_ns, after.st_ctime_ns) == (before.st_mtime_ns, before.st_ctime_ns)
    assert not any((plant / _version()).iterdir())


@pytest.mark.threat(5, 135)
def test_a_fingerprint_cannot_be_raced(work: str, plant: Path) -> None:
    """A directory and a link change places all the time; the file behind the link is never met."""
    Path(work, "lib").mkdir()
    Path(work, "lib", "secret").write_text("own")
    Path(work, "link").symlink_to(plant)
    own, outside = Path(work, "lib", "secret").stat().st_ino, (plant / "secret").stat().st_ino
    libc, done = ctypes.CDLL(None), threading.Event()

    def flip() -> None:
        while not done.is_set():
            libc.renameat2(-100, f"{work}/lib".encode(), -100, f"{work}/link".encode(), 2)

    thread = threading.Thread(target=flip)
    thread.start()
    tree, seen, plain = WorkTree(work), Counter[int](), Counter[int]()
    try:
        end = time.monotonic() + 15
        while (seen[own] < 50 or seen[0] < 50 or not plain[outside]) and time.monotonic() < end:
            found = tree.fingerprint(("lib/secret",))
            seen[0 if found is None else found[0][0]] += 1
            plain[os.stat(f"{work}/lib/secret").st_ino] += 1
    finally:
        done.set()
        thread.join()
        tree.close()
    assert seen[own]
    assert seen[0]
    assert plain[outside], "the control"
    assert not seen[outside]


# The directories of the venv stay open between commands. The attacks exchange what their names
# refer to and leave the open directories as they were.

_VENV_PATH = f".sandbox-venv/lib/{_version()}/site-packages"
_EXCHANGES = {
    "a copy of everything": "mv .sandbox-venv old; cp -a old .sandbox-venv",
    "a copy of one directory": "mv .sandbox-venv/lib lib; cp -a lib .sandbox-venv/lib",
    "a link to the open directory": "mv .sandbox-venv old; ln -s old .sandbox-venv",
    "a link in the middle": "mv .sandbox-venv/lib old; ln -s ../old .sandbox-venv/lib",
    "the same directory, moved away and back": "mv .sandbox-venv old; mv old .sandbox-venv",
    "nothing": "rm -rf .sandbox-venv",
}
_PLANTED = "import os; os.environ['PLANTED'] = 'yes'"


@pytest.mark.threat(5, 135)
@pytest.mark.spec("B5")
@pytest.mark.parametrize("how", _EXCHANGES)
async def test_a_replaced_directory_of_the_venv_is_noticed(
    jailed: OpenSession, work: str, how: str
) -> None:
    """The hook that every Python of the venv starts with is the host's own again."""
    async with jailed(host_work_dir=work) as jail:
        await jail.run_code("pass")
        own = Path(work, _VENV_PATH, "_union_sandbox.pth").read_bytes()
        tree = WorkTree(work)
        names = (*_parents(_VENV_PATH), f"{_VENV_PATH}/_union_sandbox.pth")
        try:
            held = tree.hold(names)
            assert held is not None
            assert held.is_unchanged(), "the control"
            change = f"{_EXCHANGES[how]}; f={_VENV_PATH}/_union_sandbox.pth; "
            moved = await jail.exec(f'{change} [ ! -e $f ] || {{ rm $f; echo "{_PLANTED}" >$f; }}')
            assert moved.returncode == 0, moved.stderr
            assert not held.is_unchanged()
        finally:
            tree.close()
        assert not held.is_unchanged(), "it is closed"
        for _ in range(2):
            code = "import os; print(os.environ.get('PLANTED'))"
            assert await jail.run_code(code) == "None\n"
        assert Path(work, _VENV_PATH, "_union_sandbox.pth").read_bytes() == own
        for path in _parents(_VENV_PATH):
            assert stat.S_ISDIR(os.lstat(f"{work}/{path}").st_mode)


def _parents(path: str) -> tuple[str, ...]:
    parts = path.split("/")
    return tuple("/".join(parts[: k + 1]) for k in range(len(parts)))


@pytest.mark.threat(5, 135)
def test_held_names_cannot_be_raced(work: str, plant: Path) -> None:
    """A directory and a link change places all the time; no name behind the link is looked up."""
    Path(work, "lib").mkdir()
    Path(work, "lib", "secret").write_text("own")
    Path(work, "link").symlink_to(plant)
    libc, done = ctypes.CDLL(None), threading.Event()
    tree, seen, plain = WorkTree(work), Counter[bool](), Counter[int]()
    held = tree.hold(("lib/secret",))
    outside = (plant / "secret").stat().st_ino
    looked: set[int] = set()

    def flip() -> None:
        while not done.is_set():
            libc.renameat2(-100, f"{work}/lib".encode(), -100, f"{work}/link".encode(), 2)

    thread = threading.Thread(target=flip)
    try:
        assert held is not None
        assert held.is_unchanged(), "the control"
        directory = held._seen[1][0]
        thread.start()
        end = time.monotonic() + 15
        while (not seen[False] or not plain[outside]) and time.monotonic() < end:
            seen[held.is_unchanged()] += 1
            looked.add(os.stat("secret", dir_fd=directory, follow_symlinks=False).st_ino)
            plain[os.stat(f"{work}/lib/secret").st_ino] += 1
    finally:
        done.set()
        thread.join()
        tree.close()
    assert seen[False]
    assert plain[outside], "the control"
    assert outside not in looked
