"""The programs of the deployment document, as they are written there, run."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

HEAD = """\
import flyte
from datetime import timedelta
from union import sandbox as sb

env = flyte.TaskEnvironment(
    name="agent",
    image=flyte.Image.from_debian_base().with_pip_packages(
        "unionai-sandbox[remote]"
    ),
)
"""
IN_A_TASK_POD = """\
import flyte
from union import sandbox as sb

# userns: vanilla pod, no special capabilities.
userns_env = flyte.TaskEnvironment(
    name="sandboxed-userns",
    image=sb.base_sandbox_image,
)

# bwrap: same image, but the pod grants CAP_SYS_ADMIN + unconfined AppArmor.
bwrap_env = flyte.TaskEnvironment(
    name="sandboxed-bwrap",
    image=sb.base_sandbox_image,
    pod_template=flyte.PodTemplate().allow_nested_sandboxing(),
)

@userns_env.task
async def run_userns() -> str:
    async with sb.on_device.session(backend="userns") as sbx:
        proc = await sbx.run("uname -a", stdout=True)
        out, _ = await proc.communicate_text()
        return out

@bwrap_env.task
async def run_bwrap() -> str:
    async with sb.on_device.session(backend="bubblewrap") as sbx:
        proc = await sbx.run("uname -a", stdout=True)
        out, _ = await proc.communicate_text()
        return out
"""
REMOTE = (
    HEAD
    + """
@env.task
async def main() -> str:
    async with await sb.session(timeout=timedelta(minutes=30)) as sbx:
        proc = await sbx.run("uname -a", stdout=True)
        out, _ = await proc.communicate_text()
        print(sbx.name, sbx.ip, sbx.created_at, sbx.url)
        return out
"""
)
FAMILY = (
    HEAD
    + """
import asyncio
from datetime import timedelta
from union import sandbox as sb

@env.task
async def child(sbx: sb.SandboxSession, script: str) -> dict:
    # Reference mode: no `async with` needed. Endpoint round-tripped via
    # serialization; first run() lazily opens the transport.
    proc = await sbx.run(script, stdout=True)
    out, _ = await proc.communicate_text()
    return {"script": script, "stdout": out, "returncode": proc.returncode}

@env.task
async def parent() -> list[dict]:
    # Owner mode: we launched the pod, so we own its lifetime and abort on exit.
    async with await sb.session(timeout=timedelta(minutes=15)) as sbx:
        return await asyncio.gather(
            child(sbx, "echo one"),
            child(sbx, "echo two"),
        )
"""
)
DETACHED = """\
import flyte
from datetime import timedelta
from union import sandbox as sb

env = flyte.TaskEnvironment(
    name="long-running-service",
    image=flyte.Image.from_debian_base().with_pip_packages(
        "unionai-sandbox[remote]"
    ),
)

@env.task
async def serve_user_session(user_id: str) -> str:
    sbx = await sb.session(timeout=timedelta(minutes=30))
    await sbx                       # wait for the pod to surface, fail fast on a bad launch
    try:
        proc = await sbx.run("uname -a", stdout=True)
        out, _ = await proc.communicate_text()
        return out
    finally:
        await sbx.close()           # closes the transport and aborts the run (owner side)
"""
MY_SANDBOXES = """\
import flyte
from union import sandbox as sb

ml_sandbox = sb.SandboxEnvironment(
    name="ml-sandbox",
    image=sb.base_sandbox_image.with_pip_packages("torch", "transformers"),
    resources=flyte.Resources(cpu="8", memory="32Gi", gpu="L4:1"),
    secrets=[flyte.Secret(group="hf", key="HF_TOKEN")],
    env_vars={"HF_HOME": "/tmp/hf"},
    sandbox_mode="userns",        # "userns" | "bwrap"
    runtime="container",          # "container" | "gvisor"
    description="ML inference sandbox",
)
"""
CUSTOM = """\
import flyte
from union import sandbox as sb
from my_sandboxes import ml_sandbox

env = flyte.TaskEnvironment(
    name="agent",
    image=flyte.Image.from_debian_base().with_pip_packages(
        "unionai-sandbox[remote]"
    ),
)

@env.task
async def run_inference() -> str:
    async with await sb.session(environment=ml_sandbox) as sbx:
        proc = await sbx.run(
            "python -c 'import torch; print(torch.__version__)'",
            stdout=True,
        )
        out, _ = await proc.communicate_text()
        return out
"""
PRINTED = "print(repr(flyte.run({}).outputs()[0]))"
PROGRAMS = {
    "on-device, userns": (IN_A_TASK_POD, PRINTED.format("run_userns"), "'Linux "),
    "on-device, bwrap": (IN_A_TASK_POD, PRINTED.format("run_bwrap"), "'Linux "),
    "remote": (REMOTE, PRINTED.format("main"), "'Linux "),
    "parent and children": (
        FAMILY,
        PRINTED.format("parent"),
        (
            "[{'script': 'echo one', 'stdout': 'one\\n', 'returncode': 0}, "
            "{'script': 'echo two', 'stdout': 'two\\n', 'returncode': 0}]"
        ),
    ),
    "detached": (DETACHED, PRINTED.format("serve_user_session, user_id='jo'"), "'Linux "),
}


def run(folder: Path, source: str) -> subprocess.CompletedProcess[str]:
    (folder / "program.py").write_text(source)
    return subprocess.run(
        [sys.executable, "program.py"],
        check=False,
        capture_output=True,
        text=True,
        timeout=110,
        cwd=folder,
        env=dict(os.environ),
    )


@pytest.mark.spec("I4", "I5", "I8")
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_program_runs_as_written(name, own_home):
    source, last, printed = PROGRAMS[name]
    done = run(own_home, f"{source}\n{last}\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith(printed)
    assert "Unclosed" not in done.stderr
    if name == "remote":
        words = done.stdout.splitlines()[0].split()
        assert (words[0][:4], words[1], words[-1]) == ("sbx-", "None", "None")


@pytest.mark.spec("I6", "J")
def test_a_gpu_without_bubblewrap_fails_before_anything_is_started(own_home):
    (own_home / "my_sandboxes.py").write_text(MY_SANDBOXES)
    done = run(own_home, f"{CUSTOM}\n{PRINTED.format('run_inference')}\n")
    assert done.returncode != 0
    shown = done.stdout + done.stderr
    assert "shows no GPU" in shown
    assert 'my_sandboxes.py", line 4' in shown, "it is refused where it is written"


# Every distribution that the extra does not bring is as good as not installed.
ONLY_THE_EXTRA = """\
import importlib.abc, re, sys
from importlib import metadata

def closure(names):
    found, left = set(), list(names)
    while left:
        name = re.sub(r"[-_.]+", "-", left.pop()).lower()
        if name in found:
            continue
        found.add(name)
        try:
            needs = metadata.requires(name) or ()
        except metadata.PackageNotFoundError:
            continue
        left += [re.match(r"[\\w.-]+", n)[0] for n in needs if "extra ==" not in n]
    return found

own = metadata.requires("unionai-sandbox")
brought = [re.match(r"[\\w.-]+", n)[0] for n in own
           if "extra ==" not in n or re.search(r"extra == .flyte.", n)]
allowed = closure([*brought, "unionai-sandbox"])
modules = metadata.packages_distributions()

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        owners = modules.get(name.partition(".")[0], ())
        owners = {re.sub(r"[-_.]+", "-", owner).lower() for owner in owners}
        if owners and not owners & allowed:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
"""


@pytest.mark.spec("A2", "I6")
def test_the_flyte_extra_brings_what_the_example_needs(own_home):
    """The positive control is a module of this environment that the extra does not bring."""
    done = run(own_home, f"{ONLY_THE_EXTRA}\n{IN_A_TASK_POD}\nprint(bwrap_env.name)\n")
    assert (done.returncode, done.stdout) == (0, "sandboxed-bwrap\n"), done.stderr
    done = run(own_home, f"{ONLY_THE_EXTRA}\nimport pytest\n")
    assert "No module named 'pytest'" in done.stderr
