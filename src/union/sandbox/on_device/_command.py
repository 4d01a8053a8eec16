"""Build the exec request for a sandbox from a RunSpec."""

from __future__ import annotations

import itertools
import os
import resource
from pathlib import Path
from typing import TYPE_CHECKING, Final

from union.sandbox._core.files import VENV_DIR
from union.sandbox._core.paths import work_path
from union.sandbox._linux import inherited
from union.sandbox._linux.command import Command, packed_rlimits
from union.sandbox._plan.rootfs import BIN_DIR, PYTHON_SLOT, SHELL_SLOT
from union.sandbox._system import IS_LINUX
from union.sandbox.on_device._network import proxy_variables, shape_of
from union.sandbox.on_device._shell import SH, find_shell, means_the_same
from union.sandbox.on_device._trust import http_variables

if TYPE_CHECKING:
    from collections.abc import Mapping

    from union.sandbox._core.literals import Shell
    from union.sandbox._core.spec import Limits, NetworkSpec, RunSpec

__all__ = ["CommandBuilder"]

_SYSTEM_PATH: Final = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"
_MAX_ARGUMENT_BYTES: Final = 120 * 1024
"""A longer shell command is passed as a file: the kernel limits one argument to 128 KiB."""
_SLOTS: Final = {"python": (PYTHON_SLOT, 0), "shell": (SHELL_SLOT, 1)}
_NO_NETWORK: Final = {"SANDBOX_NETWORK": "blocked", "UV_HTTP_RETRIES": "0"}
"""With these, an installation without network fails at once, and explains why."""
_NO_BUDGET: Final = 2**31
_LEFT_IN_FLIGHT: Final = 384
"""Descriptors in flight that sandboxes leave to their caller: the 253 of one message, and some."""
_NUMBERS = itertools.count(1)
_Variables = tuple[dict[str, str], tuple[str, ...]]
"""Variables by name, and as NAME=value strings for execve."""


class CommandBuilder:
    """Build the commands of one session.

    Args:
        work_dir: the path of the work dir inside.
        limits: the limits of the session.
        scratch: a directory for script files of the backends without a private root; None
            otherwise.
        tmp_dir: the value of TMPDIR of a backend that isolates without a private root; else None.
        uv: the path of ``uv`` on the host, used with ``scratch`` only.
        shell: the shell of commands that are text; None for bash where the sandbox has it.

    """

    def __init__(
        self,
        *,
        work_dir: str,
        limits: Limits,
        scratch: str | None,
        uv: str,
        tmp_dir: str | None = None,
        shell: Shell | None = None,
    ) -> None:
        self._shell = find_shell(shell)
        self._is_bash = self._shell != SH
        self._may_use_sh = shell is None
        self._uv = uv
        self._work_dir = work_dir
        self._venv = f"{work_dir}/{VENV_DIR}"
        self._scratch = scratch
        self._tmp_dir = tmp_dir
        self._isolated = scratch is None or tmp_dir is not None
        self._base = self._environment()
        self._last: tuple[NetworkSpec | None, Mapping[str, str], _Variables] = (None, {}, ({}, ()))
        self._rlimits = [_packed_rlimits(limits, shares_id=shares) for shares in (False, True)]

    def build(
        self,
        spec: RunSpec,
        *,
        host_env: Mapping[str, str],
        count_processes: bool,
        shares_id: bool,
    ) -> Command:
        usual, env = self._default_env(spec, host_env)
        path = usual["PATH"]
        if spec.env or spec.pty is not None:
            terminal = {"TERM": "xterm-256color"} if spec.pty is not None else {}
            theirs = {**usual, **terminal, **dict(spec.env)}
            path, env = theirs["PATH"], _env_strings(theirs)
        cwd = self._work_dir if spec.cwd is None else self._cwd(spec.cwd)
        script: bytes | None = None
        slot = 0
        programs: tuple[str, ...]
        if spec.kind == "argv":
            programs, argv = _candidates(spec.argv[0], path, cwd), spec.argv
        elif spec.kind == "shell" and _fits_argument(spec.text):
            if not self._is_bash or (self._may_use_sh and means_the_same(spec.text)):
                programs, argv = (SH,), ("sh", "-c", "--", spec.text)
            else:
                # Without --norc, bash reads the work dir's .bashrc where its stdin is a socket.
                programs, argv = (self._shell,), ("bash", "--norc", "-c", "--", spec.text)
        else:
            program = f"{self._venv}/bin/python" if spec.kind == "python" else self._shell
            path, slot = _SLOTS[spec.kind]
            source = spec.text.encode("utf-8", "surrogateescape")
            if self._scratch is None:
                script = source
            else:
                path = f"{self._scratch}/{next(_NUMBERS)}-{os.path.basename(path)}"
                Path(path).write_bytes(source)
            without_rc = ("--norc",) if self._is_bash and spec.kind == "shell" else ()
            programs, argv = (program,), (program, *without_rc, path)
        every, all_but_processes = (
            self._rlimits[shares_id]
            if spec.call is None
            else _packed_rlimits(spec.call.limits, shares_id=shares_id)
        )
        return Command(
            programs=programs,
            argv=argv,
            env=env,
            cwd=cwd,
            # The kernel counts processes per user namespace, so the limit is the sandbox's own.
            rlimits=every if count_processes and self._isolated else all_but_processes,
            script=script,
            slot=slot,
        )

    def _environment(self) -> dict[str, str]:
        own_bin = BIN_DIR if self._scratch is None else os.path.dirname(self._uv)
        # Without a private root /etc/gitconfig exists and cannot be read, which is fatal for git.
        of_git = {"GIT_CONFIG_NOSYSTEM": "1"} if self._tmp_dir is not None else {}
        return {
            "PATH": f"{self._venv}/bin:{own_bin}:{_SYSTEM_PATH}",
            "HOME": self._work_dir,
            "USER": "sandbox",
            # The least of git's sources for an author: `git commit` works without configuration.
            "EMAIL": "sandbox@localhost",
            "LANG": "C.UTF-8",
            "LC_ALL": "C.UTF-8",
            "TMPDIR": self._tmp_dir or "/tmp",  # noqa: S108 - a name inside the sandbox
            "TERM": "dumb",
            "VIRTUAL_ENV": self._venv,
            **of_git,
        }

    def _default_env(self, spec: RunSpec, host_env: Mapping[str, str]) -> _Variables:
        """Return the default variables, cached because most commands are like the last one."""
        network, was_host_env, found = self._last
        if network is not spec.network or was_host_env is not host_env:
            usual = {**self._base, **self._proxies(spec), **host_env}
            # The caller's authorities are part of the file that these variables name.
            usual |= http_variables(spec.network, work_dir=self._work_dir)
            found = (usual, _env_strings(usual))
            self._last = (spec.network, host_env, found)
        return found

    def _proxies(self, spec: RunSpec) -> dict[str, str]:
        """Return the proxy variables; without a private network our proxies do not exist."""
        filtered = shape_of(spec.network) == "filtered"
        if not self._isolated and filtered:
            return {}
        # Without a private network the resolver of the C library must use TCP, which is mediated.
        by_tcp = {"RES_OPTIONS": "use-vc"} if filtered and self._tmp_dir is not None else {}
        no_network = _NO_NETWORK if self._isolated and spec.network.mode == "blocked" else {}
        return proxy_variables(spec.network) | by_tcp | no_network

    def _cwd(self, cwd: str) -> str:
        if cwd.startswith("/"):
            return cwd
        relative = work_path(cwd, work_dir=self._work_dir, argument="cwd", allow_root=True)
        return f"{self._work_dir}/{relative}"


def _env_strings(env: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(f"{name}={value}" for name, value in env.items())


def _fits_argument(text: str) -> bool:
    max_bytes_per_character = 4
    return (
        len(text) * max_bytes_per_character < _MAX_ARGUMENT_BYTES
        or len(text.encode("utf-8", "surrogateescape")) < _MAX_ARGUMENT_BYTES
    )


def _candidates(program: str, path: str, cwd: str) -> tuple[str, ...]:
    """Return the paths to try, in the order of PATH; the sandbox tries them at exec."""
    if "/" in program:
        return (program,)
    return tuple(f"{directory or cwd}/{program}" for directory in path.split(":"))


def _packed_rlimits(limits: Limits, *, shares_id: bool) -> tuple[bytes, bytes]:
    """Return all limits, and all but the number of processes."""
    every = _rlimits(limits, shares_id=shares_id)
    return packed_rlimits(every), packed_rlimits(every[:-1])


def _rlimits(limits: Limits, *, shares_id: bool) -> list[tuple[int, int, int]]:
    open_files = limits.open_files
    if shares_id:
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        open_files = min(open_files, _beside(soft)) if soft > 0 else open_files
    pairs = (
        (resource.RLIMIT_NOFILE, open_files),
        (resource.RLIMIT_FSIZE, limits.file_size_bytes),
        # The first process of the sandbox is the launcher's.
        (resource.RLIMIT_NPROC, min(limits.processes + 1, _process_budget())),
    )
    return [(kind, *_within_hard(kind, value)) for kind, value in pairs]


def _beside(soft: int) -> int:
    """Return the limit on open files that leaves enough to a caller with the limit ``soft``.

    The kernel counts file descriptors in flight per user. It compares the count with this limit of
    the sender, before a message that may exceed it. The rest is left to the caller, who could send
    none otherwise. Messages that are sent at the same moment can pass the check together, so no
    limit is exact; `_counter_guard` ends a command that exceeds the caller's limit that way.
    """
    return max(min(soft * 3 // 4, soft - _LEFT_IN_FLIGHT), soft // 2, 1)


def _process_budget() -> int:
    # On other systems the limit counts all processes of the user, so no command gets it.
    return inherited.process_budget() if IS_LINUX else _NO_BUDGET


def _within_hard(kind: int, value: int) -> tuple[int, int]:
    hard = resource.getrlimit(kind)[1]
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    return value, value
