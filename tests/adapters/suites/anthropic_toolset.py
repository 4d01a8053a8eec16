"""pytest plugin: Anthropic's tests of its agent toolset, with all six tools in a sandbox."""

import functools
import os

import anthropic.lib.tools.agent_toolset as toolset

from union.sandbox.adapters import anthropic as adapter

BACKEND = os.environ.get("ADAPTER_BACKEND", "userns")


class BashSession(adapter.UnionBashSession):
    @classmethod
    async def start(cls, workdir, *, env=None):
        return await super().start(workdir, env=env, backend=BACKEND)


def tool(name, ctx):
    return next(t for t in adapter.agent_toolset(ctx, backend=BACKEND) if t.name == name)


toolset.BashSession = BashSession
toolset.beta_agent_toolset_20260401 = lambda ctx: adapter.agent_toolset(ctx, backend=BACKEND)
for name in ("bash", *adapter.FILE_TOOLS):
    setattr(toolset, f"beta_{name}_tool", functools.partial(tool, name))
