"""pytest plugin: Strands' tests of its host environment, with our sandbox in its place."""

import os

import strands.sandbox.not_a_sandbox_local_environment as local

from union.sandbox.adapters.strands import UnionSandbox

BACKEND = os.environ.get("ADAPTER_BACKEND", "userns")


class Sandbox(UnionSandbox):
    def __init__(self):
        # pytest's directories lie below it, so that they are visible inside.
        super().__init__(backend=BACKEND, host_work_dir=os.environ["ADAPTER_SCRATCH"])


local.NotASandboxLocalEnvironment = Sandbox
