"""The places where the suite has to hold, each as a function that runs a command there.

`unprivileged`      a plain user of this machine, with no entry in the user database;
`pod-root`          uid 0 in a container without any capability;
`pod-user`          uid 1000 in the same container;
`pod-default-caps`  uid 0 with the capabilities that engines grant when nothing is asked.

By hand: `python -m tests.environments.places pod-root -- sh -c 'cat /proc/self/status'`.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from tests.environments import pod
from tests.environments.suite import first_closed, staged_suite
from tests.environments.supervise import Outcome, run_supervised

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

LIMIT_S = 900.0
# Above the ids that distributions give to people, and one for each test process: the kernel counts
# processes per user, and several runs use this place at a time.
PLAIN_UID = 61_000 + os.getpid() % 1_000
PODS: Mapping[str, pod.Pod] = {
    "pod-root": pod.Pod(uid=0),
    "pod-user": pod.Pod(uid=1000),
    "pod-default-caps": pod.Pod(uid=0, capabilities=pod.DEFAULT_CAPABILITIES),
}
NAMES = ("unprivileged", *PODS)
_AFTER = '"$@" || exit; test ! -e "$0/state/null-netns" || umount "$0/state/null-netns"'


class Runner(Protocol):
    """Run one command in a place."""

    def __call__(
        self,
        argv: list[str],
        /,
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        timeout_s: float = LIMIT_S,
        inherit_streams: bool = False,
    ) -> Outcome:
        """Run `argv`; raise `subprocess.TimeoutExpired` past the limit, with nothing left alive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A named place and the way to run a command in it."""

    name: str
    run: Runner


def missing(name: str) -> str | None:
    """Return what this machine lacks for the place `name`, or None if it can be created."""
    if os.geteuid() != 0:
        return "making other users and containers needs root: run the tests as root"
    tool, package = ("setpriv", "util-linux") if name == "unprivileged" else ("runc", "runc")
    if shutil.which(tool) is None:
        return f"{tool} is not installed: apt-get install {package}"
    return None


def own_prefix(pid: int) -> str:
    """Return how the names of all that process `pid` makes begin: directories, control groups."""
    return f"sbx-place-{pid}-"


@contextmanager
def open_place(name: str, *, readable: Sequence[Path] = ()) -> Iterator[Place]:
    """Make the place `name`; it and all it holds are removed at the end.

    `readable` are directories of this machine that must be there, at the same path. Containers get
    them as read-only mounts; for the plain user they have to be readable already.
    """
    if name not in NAMES:
        message = f"no place is called {name!r}; there are {', '.join(NAMES)}"
        raise ValueError(message)
    with _open(name, shape=PODS.get(name), readable=readable) as place:
        yield place


@contextmanager
def open_pod(name: str, shape: pod.Pod, *, readable: Sequence[Path] = ()) -> Iterator[Place]:
    """Make a container of any shape, as `open_place` makes those that have a name here."""
    with _open(name, shape=shape, readable=readable) as place:
        yield place


@contextmanager
def _open(name: str, *, shape: pod.Pod | None, readable: Sequence[Path]) -> Iterator[Place]:
    base = Path(tempfile.mkdtemp(prefix=own_prefix(os.getpid())))
    base.chmod(0o755)
    try:
        if shape is None:
            execute = _plain_user(base, readable=readable)
        else:
            execute = _container(base, shape=shape, readable=readable)

        def run(
            argv: list[str],
            /,
            *,
            env: Mapping[str, str] | None = None,
            cwd: Path | None = None,
            timeout_s: float = LIMIT_S,
            inherit_streams: bool = False,
        ) -> Outcome:
            return execute(
                _Command(
                    argv=argv,
                    env={"SBX_PLACE": name, **(env or {})},
                    cwd=cwd,
                    timeout_s=timeout_s,
                    inherit_streams=inherit_streams,
                )
            )

        yield Place(name=name, run=run)
    finally:
        shutil.rmtree(base)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Command:
    argv: list[str]
    env: Mapping[str, str]
    cwd: Path | None
    timeout_s: float
    inherit_streams: bool

    def environment(self, home: Path) -> dict[str, str]:
        """Build the whole environment: nothing of the test runner's own leaks in."""
        return {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": str(home),
            "USER": "user",
            "LOGNAME": "user",
            "LANG": "C.UTF-8",
            "HYPOTHESIS_STORAGE_DIRECTORY": str(home / ".hypothesis"),
            **self.env,
        }


def _plain_user(base: Path, *, readable: Sequence[Path]) -> Callable[[_Command], Outcome]:
    for path in readable:
        closed = first_closed(path)
        if closed is not None:
            message = f"{path} is out of reach for other users: {closed} is closed to them"
            raise ValueError(message)
    home, scratch = base / "home", base / "tmp"
    for path in (home, scratch):
        path.mkdir()
        path.chmod(0o755)
        os.chown(path, PLAIN_UID, PLAIN_UID)

    def execute(command: _Command) -> Outcome:
        become = ["setpriv", f"--reuid={PLAIN_UID}", f"--regid={PLAIN_UID}", "--clear-groups"]
        return run_supervised(
            [*become, "--", *command.argv],
            timeout_s=command.timeout_s,
            env={"TMPDIR": str(scratch), **command.environment(home)},
            cwd=command.cwd or home,
            inherit_streams=command.inherit_streams,
        )

    return execute


def _container(
    base: Path, *, shape: pod.Pod, readable: Sequence[Path]
) -> Callable[[_Command], Outcome]:
    pod.make_rootfs(base, uid=shape.uid, first_id=shape.first_id)

    def execute(command: _Command) -> Outcome:
        identity = own_prefix(os.getpid()) + secrets.token_hex(6)
        work = pod.Workload(
            argv=command.argv,
            env=command.environment(pod.HOME),
            cwd=command.cwd or pod.HOME,
            readable=readable,
            cgroup=identity,
        )
        pod.write_config(base, pod=shape, work=work)
        runtime = [*shape.runtime, "--root", str(base / "state")]
        return run_supervised(
            [*runtime, "run", "--bundle", str(base), identity],
            timeout_s=command.timeout_s,
            env=os.environ,
            cwd=base,
            # A container that ran to its end is deleted already; force makes that no error.
            # runsc leaves a network namespace mounted among its state.
            after=["sh", "-c", _AFTER, str(base), *runtime, "delete", "--force", identity],
            inherit_streams=command.inherit_streams,
        )

    return execute


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command in a place, with this terminal's streams; return its exit code."""
    parser = argparse.ArgumentParser(prog="places", description=main.__doc__)
    parser.add_argument("place", choices=NAMES)
    parser.add_argument("--readable", action="append", type=Path, default=[], metavar="DIR")
    parser.add_argument("--suite", action="store_true", help="bring the test venv and the tests")
    parser.add_argument("--timeout", type=float, default=LIMIT_S, metavar="SECONDS")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(argv)
    lacking = missing(options.place)
    if lacking is not None:
        parser.error(lacking)

    def run(readable: Sequence[Path], env: Mapping[str, str], cwd: Path | None) -> int:
        with open_place(options.place, readable=readable) as place:
            done = place.run(
                options.command, env=env, cwd=cwd, timeout_s=options.timeout, inherit_streams=True
            )
        return done.returncode

    try:
        if not options.suite:
            return run(options.readable, {}, None)
        with staged_suite() as suite:
            readable = [*options.readable, *suite.readable]
            return run(readable, suite.environment(), suite.root)
    except subprocess.TimeoutExpired:
        sys.stderr.write(f"places: killed after {options.timeout:g} s\n")
        return 124


if __name__ == "__main__":
    sys.exit(main())
