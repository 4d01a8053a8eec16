"""smolagents: an executor that runs the code of a ``CodeAgent`` in a sandbox."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, Any, Final

from union.sandbox.adapters._common import LazySession, require_framework
from union.sandbox.sync import _portal

require_framework("smolagents", extra="smolagents")

from smolagents.remote_executors import RemotePythonExecutor  # noqa: E402 - the check comes first
from smolagents.utils import AgentError  # noqa: E402 - the check comes first

from union.sandbox.constants import PYPI_HOSTS  # noqa: E402 - the check comes first

try:
    from smolagents.local_python_executor import CodeOutput
except ImportError:  # where versions before 1.20 had it
    from smolagents.remote_executors import CodeOutput

if TYPE_CHECKING:
    from union.sandbox._contexts.values import CellResult

__all__ = ["UnionExecutor"]

_PIP: Final = re.compile(r"^\s*[!%]\s*pip\s+install\s+(.*)$")
_ANSWER: Final = "_union_final_answer"
_MAX_LOG: Final = 1024 * 1024


class UnionExecutor(RemotePythonExecutor):
    """Runs the code of an agent in one interpreter: ``CodeAgent(..., executor=UnionExecutor())``.

    Variables persist between steps. The network is blocked, except that packages are installed
    from the public index in calls of their own.

    Args:
        additional_imports: packages to install first; none by default.
        logger: the agent's logger; None (default) for a new one.
        allow_pickle: whether objects that are not JSON values may be exchanged as pickles, which
            lets sandboxed code run code here. False by default.
        timeout_s: seconds for each step; None (default) for no limit.
        session: a session to use, which is not closed here; None (default) opens one.
        **options: arguments of ``on_device.session()``.

    """

    def __init__(
        self,
        additional_imports: list[str] | None = None,
        logger: Any = None,
        *,
        allow_pickle: bool = False,
        timeout_s: float | None = None,
        session: object = None,
        **options: Any,
    ) -> None:
        if logger is None:
            from smolagents.monitoring import AgentLogger, LogLevel

            logger = AgentLogger(level=LogLevel.ERROR)
        super().__init__(additional_imports or [], logger, allow_pickle)
        self._session = LazySession(session, options=options)
        self._timeout_s = timeout_s
        if self.additional_imports:
            self.installed_packages = self.install_packages(self.additional_imports)

    def run_code_raise_errors(self, code: str) -> CodeOutput:
        """Run code; an exception in it raises ``AgentError``.

        Args:
            code: Python source. A line ``!pip install NAME`` installs packages.

        """
        lines = []
        for line in code.splitlines():
            wanted = _PIP.match(line)
            if wanted:
                self.install_packages([p for p in wanted[1].split() if not p.startswith("-")])
            lines.append("" if wanted else line)
        portal = _portal.Portal.current()
        result: CellResult = portal.call(lambda: self._run("\n".join(lines)), on_interrupt=None)
        logs = (result.stdout + result.stderr)[-_MAX_LOG:]
        error = result.error
        if error is not None and error.name == self.FINAL_ANSWER_EXCEPTION:
            encoded = portal.call(self._final_answer, on_interrupt=None)
            answer = self._deserialize_final_answer(encoded, allow_pickle=self.allow_pickle)
            return CodeOutput(output=answer, logs=logs, is_final_answer=True)
        if error is not None:
            message = f"{logs}\nExecuting code yielded an error:\n"
            raise AgentError(
                f"{message}{error.name}: {error.value}\n{error.traceback}", self.logger
            )
        if result.ended:
            raise AgentError(
                f"{logs}\nThe code was ended: {result.ended}: {result.reason}", self.logger
            )
        return CodeOutput(output=_value(result), logs=logs, is_final_answer=False)

    def _patch_final_answer_with_exception(self, final_answer_tool: Any) -> None:
        """Have the tool store its answer, because messages of exceptions are cut."""
        super()._patch_final_answer_with_exception(final_answer_tool)
        forward = type(final_answer_tool).forward
        head, found, tail = forward.__source__.partition("raise FinalAnswerException(")
        if not found:
            raise AgentError("This version of smolagents is not supported", self.logger)
        keep = f"import builtins; builtins.{_ANSWER} = "
        value = tail.rstrip().removesuffix(")")
        indent = head[head.rindex("\n") + 1 :]
        forward.__source__ = f"{head}{keep}{value}\n{indent}raise FinalAnswerException('')\n"

    async def _final_answer(self) -> str:
        """Return the answer that the tool has stored, as text; it is checked by its reader."""
        result = await (await self._session.context()).run(
            f"__import__('builtins').__dict__.pop({_ANSWER!r})"
        )
        if result.text is None:
            raise AgentError("The final answer could not be read", self.logger)
        return str(ast.literal_eval(result.text))

    async def _run(self, code: str) -> CellResult:
        context = await self._session.context()
        return await context.run(code, timeout_s=self._timeout_s)

    def install_packages(self, additional_imports: list[str]) -> list[str]:
        """Install packages from the public index; no other host can be reached meanwhile.

        Args:
            additional_imports: requirements.

        """
        present = _portal.Portal.current().call(
            lambda: self._present(additional_imports), on_interrupt=None
        )
        missing = [name for name in additional_imports if name not in present]
        if not missing:
            return additional_imports
        result = self._session.face().exec(
            ["uv", "pip", "install", "--", *missing],
            network_mode="allowlist",
            network_allowlist=PYPI_HOSTS,
        )
        self.logger.log(result.stderr)
        if not result.ok:
            raise AgentError(f"Packages were not installed:\n{result.stderr}", self.logger)
        return additional_imports

    async def _present(self, names: list[str]) -> list[str]:
        """Return the packages that can be imported inside already, such as those of the caller."""
        if not names:
            return []
        context = await self._session.context()
        result = await context.run(
            f"""
import importlib.metadata as _metadata
def _is_present(name):
    try:
        return bool(_metadata.version(name))
    except (_metadata.PackageNotFoundError, ValueError):
        return False
[name for name in {names!r} if _is_present(name)]
"""
        )
        found = [] if result.text is None else ast.literal_eval(result.text)
        return [name for name in names if name in found]

    def cleanup(self) -> None:
        """End the sandbox, unless the session was given."""
        self._session.close()


def _value(result: CellResult) -> Any:
    """Return the value of the last expression: an image, or text."""
    found = result.result
    if found is None:
        return None
    if found.png is not None:
        import io

        import PIL.Image

        return PIL.Image.open(io.BytesIO(found.png))
    return found.text
