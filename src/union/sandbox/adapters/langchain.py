"""LangChain: an execution policy that runs the persistent shell of an agent in a sandbox."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from union.sandbox.adapters._common import require_framework

require_framework("langchain", extra="langchain")

from langchain.agents.middleware._execution import (  # noqa: E402 - the check comes first
    BaseExecutionPolicy,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

__all__ = ["UnionExecutionPolicy"]

_SBX: Final = "import sys; from union.sandbox._cli.main import main; sys.exit(main())"


@dataclass
class UnionExecutionPolicy(BaseExecutionPolicy):
    """Run the shell of ``ShellToolMiddleware(execution_policy=...)`` in a sandbox.

    The shell sees the workspace of the middleware, which it can change, and no other files of the
    user. The fields are options of ``sbx run``.

    Args:
        backend: the isolation backend; None (default) for bubblewrap.
        network_allowlist: hosts that the shell may reach; none by default.
        read_only_paths: further paths to show read-only; none by default.
        memory: memory limit, such as ``"2Gi"``; None (default) for none.

    """

    backend: str | None = None
    network_allowlist: Sequence[str] = ()
    read_only_paths: Sequence[str | os.PathLike[str]] = ()
    memory: str | None = None

    def spawn(
        self, *, workspace: Path, env: Mapping[str, str], command: Sequence[str]
    ) -> subprocess.Popen[str]:
        """Start the shell; called by the middleware.

        Args:
            workspace: the directory to work in.
            env: variables of the shell.
            command: the shell and its arguments.

        """
        options = ["--work-dir", str(workspace)]
        if self.backend is not None:
            options += ["--backend", self.backend]
        if self.memory is not None:
            options += ["--memory", self.memory]
        for host in self.network_allowlist:
            options += ["--allow", host]
        for path in self.read_only_paths:
            options += ["--read-only", os.fspath(path)]
        for name in env:  # the values are passed on from the environment, where they are private
            options += ["--env", name]
        return subprocess.Popen(  # noqa: S603 - starts our own program
            [sys.executable, "-c", _SBX, "run", *options, "--", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=workspace,
            text=True,
            encoding="utf-8",
            errors="replace",
            bufsize=1,
            env={**os.environ, **env},
            start_new_session=True,
        )
