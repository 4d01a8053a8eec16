"""mini-swe-agent: an environment whose commands run in a sandbox.

In a configuration file: ``environment_class:
union.sandbox.adapters.mini_swe_agent.UnionEnvironment``.
"""

from __future__ import annotations

import platform
from typing import Any

from union.sandbox.adapters._common import LazySession, require_framework

require_framework("minisweagent", extra="mini-swe-agent")

from minisweagent.exceptions import Submitted  # noqa: E402 - the check comes first
from minisweagent.utils.serialize import recursive_merge  # noqa: E402 - the check comes first
from pydantic import BaseModel, ConfigDict  # noqa: E402 - a part of mini-swe-agent

from union.sandbox.constants import STDOUT  # noqa: E402 - the check comes first
from union.sandbox.errors import SandboxError  # noqa: E402 - the check comes first

__all__ = ["UnionEnvironment", "UnionEnvironmentConfig"]

_SUBMITTED = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


class UnionEnvironmentConfig(BaseModel):
    """The options of an environment; further ones are arguments of ``on_device.session()``."""

    model_config = ConfigDict(extra="allow", arbitrary_types_allowed=True)

    cwd: str = ""
    """An existing directory of this machine to work in; empty (default) for a private one."""
    env: dict[str, str] = {}
    """Variables of every command."""
    timeout: int = 30
    """Seconds for each command."""


class UnionEnvironment:
    """Runs the commands of an agent in one sandbox; opened at the first command.

    Args:
        config_class: the class of the configuration; ``UnionEnvironmentConfig`` by default.
        session: a session to use, which is not closed here; None (default) opens one.
        **options: fields of the configuration.

    """

    def __init__(
        self,
        *,
        config_class: type = UnionEnvironmentConfig,
        session: object = None,
        **options: Any,
    ) -> None:
        self.config = config_class(**options)
        extra = dict(self.config.model_extra or {})
        if self.config.cwd and session is None:
            extra["host_work_dir"] = self.config.cwd
        self._session = LazySession(session, options=extra)

    def execute(
        self, action: dict[str, Any], cwd: str = "", *, timeout: int | None = None
    ) -> dict[str, Any]:
        """Run a shell command; stdout and stderr are returned in order.

        Args:
            action: a mapping with ``command``.
            cwd: the start directory inside; empty (default) for the work dir.
            timeout: seconds; None (default) for that of the configuration.

        Raises:
            Submitted: the command has printed the line that submits the task.

        """
        limit_s = timeout or self.config.timeout
        command = action.get("command", "")
        try:
            process = self._session.face().run(
                ["/bin/bash", "-c", command],
                stderr=STDOUT,
                cwd=cwd or None,
                env=self.config.env,
                timeout_s=limit_s,
            )
            result = process.result()
        except SandboxError as exc:
            return _failure("", exc, type(exc).__name__)
        if result.termination_reason == "timeout":
            message = f"Command {command!r} timed out after {limit_s} seconds"
            return _failure(result.stdout, message, "TimeoutExpired")
        output = {"output": result.stdout, "returncode": result.returncode, "exception_info": ""}
        _check_finished(output)
        return output

    def cleanup(self) -> None:
        """End the sandbox, unless the session was given."""
        self._session.close()

    def get_template_vars(self, **variables: Any) -> dict[str, Any]:
        """Return the variables for the agent's prompts; none of this process's environment."""
        merged: dict[str, Any] = recursive_merge(
            self._shown(), platform.uname()._asdict(), variables
        )
        return merged

    def _shown(self, **options: Any) -> dict[str, Any]:
        """Return the configuration without the token of a server: prompts and files show it."""
        shown: dict[str, Any] = self.config.model_dump(exclude={"token"}, **options)
        return shown

    def serialize(self) -> dict[str, Any]:
        """Return the description of this environment for a trajectory."""
        return {
            "info": {
                "config": {
                    "environment": self._shown(mode="json"),
                    "environment_type": f"{type(self).__module__}.{type(self).__name__}",
                }
            }
        }


def _failure(output: str, reason: object, kind: str) -> dict[str, Any]:
    return {
        "output": output,
        "returncode": -1,
        "exception_info": f"An error occurred while executing the command: {reason}",
        "extra": {"exception_type": kind, "exception": str(reason)},
    }


def _check_finished(output: dict[str, Any]) -> None:
    lines = output["output"].lstrip().splitlines(keepends=True)
    if lines and lines[0].strip() == _SUBMITTED and output["returncode"] == 0:
        submission = "".join(lines[1:])
        raise Submitted(
            {
                "role": "exit",
                "content": submission,
                "extra": {"exit_status": "Submitted", "submission": submission},
            }
        )
