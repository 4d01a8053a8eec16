"""A server in a process of its own, for tests of adapters over an endpoint."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile

TOKEN = "token-of-the-tests-of-adapters"


@contextlib.contextmanager
def sandbox_server(backend, *arguments, token=None):
    """Yield the endpoint of a server and what it has announced."""
    with tempfile.TemporaryDirectory(prefix="served-") as home:
        env = {k: v for k, v in os.environ.items() if not k.startswith("SANDBOX_SERVER")}
        if token is not None:
            env["SANDBOX_SERVER_TOKEN"] = token
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "union.sandbox.server", "--bind", "127.0.0.1:0"),
                *("--backend", backend, "--work-dir", f"{home}/work", "--drain", "1", *arguments),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=env,
            text=True,
        )
        try:
            announced = json.loads(process.stdout.readline())
            yield announced["ready"][0], announced
        finally:
            process.terminate()
            process.wait(60)
