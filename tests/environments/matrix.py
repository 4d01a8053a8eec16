"""The portability matrix: kinds of machines and containers, and what is tried in each.

By hand: `python -m tests.environments.matrix` prints the table, `--write` puts it into its page.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.conftest import ISOLATED, WITHOUT_NAMESPACES
from tests.environments import pod, runsc
from tests.environments.debian import RUNSC_2024
from tests.environments.places import missing, open_place, open_pod
from tests.environments.suite import PROJECT, user_venv

if TYPE_CHECKING:
    from collections.abc import Sequence

PAGE = PROJECT / "docs" / "reference" / "portability.md"
BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->\n"
LIMIT_S = 60.0
OWN_IDS = 3_000_000
SYS_ADMIN = (*pod.DEFAULT_CAPABILITIES, "CAP_SYS_ADMIN")
# Without a network stack of its own to set up and without cgroups, which it cannot make here.
OLD_RUNSC = ("runsc", "--platform=ptrace", "--network=none", "--ignore-cgroups")
NEW_RUNSC = ("new runsc",)
"""Stands for the command of `runsc.command()`, which is found when it is used."""
DEBIAN_RUNSC = (str(RUNSC_2024.path / "usr" / "bin" / "runsc"), *runsc.OPTIONS)

# One Python for each place: the report of doctor, the result of open(), a given work dir.
LOOK = """\
import asyncio, json, os
from union import sandbox as sb

async def opened(backend, **options):
    try:
        async with sb.on_device.session(backend=backend, **options) as sbx:
            # More than the smallest /dev/shm of the places: it must be the sandbox's own.
            place = "$TMPDIR" if sbx.isolation.shm == "none" else "/dev/shm"
            stdout = (await sbx.exec(f"head -c 1000000 /dev/zero >{place}/x && echo inside")).stdout
            return {"isolation": sbx.isolation.to_dict(), "stdout": stdout}
    except sb.SandboxError as error:
        return {"code": error.code, "message": str(error.args[0]), "hint": error.hint}

async def main(names):
    found = {}
    for name in names:
        found[name] = {
            "plain": await opened(name),
            "strict": await opened(name, strict=True),
            "limited": await opened(name, resources=sb.Resources(memory="256Mi")),
            "pinned": await opened(name, host_work_dir=os.environ["HOME"]),
        }
    return found

report = sb.doctor()
isolating = [b["name"] for b in report.to_dict()["backends"] if b["name"] in BACKENDS]
print(json.dumps({"doctor": report.to_dict(), "text": str(report),
                  "opened": asyncio.run(main(isolating))}))
"""
# A backend joins by being one of the ways that the contract suite knows.
BACKENDS = (*ISOLATED, *WITHOUT_NAMESPACES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One kind of place: its name on the page, and how it is created."""

    title: str
    shape: pod.Pod | None = None
    """None: this machine itself."""
    uid: int = 0


def _pod(title: str, *, uid: int, **options: Any) -> Row:
    return Row(title=title, shape=pod.Pod(uid=uid, **options), uid=uid)


ROWS = {
    "root": Row(title="a machine, root"),
    "user": Row(title="a machine, ordinary user", uid=1000),
    "pod-user": _pod("ordinary pod, no profile, uid 1000", uid=1000),
    "pod-root": _pod(
        "ordinary pod, no profile, root", uid=0, capabilities=pod.DEFAULT_CAPABILITIES
    ),
    "pod-root-bare": _pod("pod, all capabilities dropped, root", uid=0),
    "pod-unmasked": _pod("pod with an unmasked /proc, uid 1000", uid=1000, masked_proc=False),
    "default-user": _pod("ordinary pod, RuntimeDefault, uid 1000", uid=1000, default_profile=True),
    "default-root": _pod(
        "ordinary pod, RuntimeDefault, root",
        uid=0,
        capabilities=pod.DEFAULT_CAPABILITIES,
        default_profile=True,
    ),
    "nested-user": _pod(
        "ordinary pod, `Localhost` profile of these pages, uid 1000", uid=1000, nested_profile=True
    ),
    "nested-root": _pod(
        "ordinary pod, `Localhost` profile of these pages, root",
        uid=0,
        capabilities=pod.DEFAULT_CAPABILITIES,
        nested_profile=True,
    ),
    "admin-user": _pod("SYS_ADMIN granted, no profile, uid 1000", uid=1000, capabilities=SYS_ADMIN),
    "admin-root": _pod("SYS_ADMIN granted, no profile, root", uid=0, capabilities=SYS_ADMIN),
    "admin-default-user": _pod(
        "SYS_ADMIN granted, RuntimeDefault, uid 1000",
        uid=1000,
        capabilities=SYS_ADMIN,
        default_profile=True,
    ),
    "admin-default-root": _pod(
        "SYS_ADMIN granted, RuntimeDefault, root",
        uid=0,
        capabilities=SYS_ADMIN,
        default_profile=True,
    ),
    "admin-alone-default": _pod(
        "all dropped but SYS_ADMIN, RuntimeDefault, uid 1000",
        uid=1000,
        capabilities=("CAP_SYS_ADMIN",),
        default_profile=True,
    ),
    "read-only": _pod("read-only root file system, uid 1000", uid=1000, read_only=True),
    "cgroup": _pod(
        "writable control groups, root",
        uid=0,
        capabilities=pod.DEFAULT_CAPABILITIES,
        writable_cgroup=True,
    ),
    "small-shm": _pod("/dev/shm of 64 KiB, uid 1000", uid=1000, shm="64k"),
    "own-ids-root": _pod(
        "`hostUsers: false`, no profile, root",
        uid=0,
        capabilities=pod.DEFAULT_CAPABILITIES,
        first_id=OWN_IDS,
    ),
    "own-ids-admin-root": _pod(
        "`hostUsers: false`, SYS_ADMIN granted, RuntimeDefault, root",
        uid=0,
        capabilities=SYS_ADMIN,
        default_profile=True,
        first_id=OWN_IDS,
    ),
    "own-ids-admin-user": _pod(
        "`hostUsers: false`, SYS_ADMIN granted, RuntimeDefault, uid 1000",
        uid=1000,
        capabilities=SYS_ADMIN,
        default_profile=True,
        first_id=OWN_IDS,
    ),
    "gvisor-old": _pod("gVisor, release of 2022-12, uid 1000", uid=1000, runtime=OLD_RUNSC),
    "gvisor-2024": _pod("gVisor, release of 2024-07, uid 1000", uid=1000, runtime=DEBIAN_RUNSC),
    "gvisor-user": _pod(
        f"gVisor, release of {runsc.RELEASE}, uid 1000", uid=1000, runtime=NEW_RUNSC
    ),
    "gvisor-root": _pod(
        f"gVisor, release of {runsc.RELEASE}, root",
        uid=0,
        capabilities=pod.DEFAULT_CAPABILITIES,
        runtime=NEW_RUNSC,
    ),
}


def lacking(name: str) -> str | None:
    """Return what this machine lacks for a row, or None."""
    shape = ROWS[name].shape
    found = missing("unprivileged" if shape is None else "pod-user")
    if found is None and shape is not None and shape.runtime == NEW_RUNSC:
        return runsc.lacking()
    if found is None and shape is not None and shape.runtime == DEBIAN_RUNSC:
        return RUNSC_2024.lacking()
    if found is None and shape is not None and shutil.which(shape.runtime[0]) is None:
        return f"{shape.runtime[0]} is not installed: apt-get install {shape.runtime[0]}"
    return found


def look(name: str) -> dict[str, Any]:
    """Return the results of one place."""
    row, venv = ROWS[name], user_venv()
    program = [str(venv / "bin" / "python"), "-c", f"BACKENDS = {BACKENDS!r}\n{LOOK}"]
    env = {"PATH": f"{venv / 'bin'}:/usr/local/bin:/usr/bin:/bin", "VIRTUAL_ENV": str(venv)}
    if row.shape is None and row.uid == 0:
        home = Path("/var/tmp") / f"sbx-matrix-{os.getpid()}"
        home.mkdir()
        try:
            done = subprocess.run(
                program,
                check=False,
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
                env={**env, "HOME": str(home)},
            )
        finally:
            shutil.rmtree(home)
    elif row.shape is None:
        with open_place("unprivileged", readable=[venv]) as place:
            done = place.run(program, env=env, timeout_s=LIMIT_S)
    else:
        shape = row.shape
        if shape.runtime == NEW_RUNSC:
            shape = dataclasses.replace(shape, runtime=runsc.command())
        with open_pod(name, shape, readable=[venv]) as place:
            # The system's own choice for temporary files ends with the current directory.
            done = place.run(program, env=env, cwd=Path("/"), timeout_s=LIMIT_S)
    if done.returncode != 0:
        message = f"{name}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        raise RuntimeError(message)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


HEAD = (
    "| place | "
    + " | ".join(f"`{name}`" for name in BACKENDS)
    + " |\n|---|"
    + "---|" * len(BACKENDS)
    + "\n"
)


def line(name: str, found: dict[str, Any]) -> str:
    """Return the row of the table."""
    cells = [_cell(found["opened"][backend]) for backend in BACKENDS]
    return f"| {ROWS[name].title} | " + " | ".join(cells) + " |\n"


def _cell(found: dict[str, Any]) -> str:
    report = found["plain"].get("isolation")
    if report is None:
        pinned = found["pinned"].get("isolation")
        if pinned is not None:
            return f"with `host_work_dir=`: {_works(pinned)}"
        # Messages of the kernel and of other programs, in brackets, are not the cause.
        cause = found["plain"]["message"].partition(" here: ")[2] or found["plain"]["message"]
        return f"no: {cause.partition(' (')[0]}"
    return f"{_works(report)}, memory {_memory(found['limited']['isolation'])}"


def _works(report: dict[str, Any]) -> str:
    return f"works: root {report['root']}, proc {report['proc']}, ids {report['ids']}"


def _memory(report: dict[str, Any]) -> str:
    """Not which version of control groups: that is the machine's and not the place's."""
    return str(report["limits"]["memory"]).partition("-")[0]


def table(names: Sequence[str]) -> str:
    return HEAD + "".join(line(name, look(name)) for name in names)


def main() -> int:
    parser = argparse.ArgumentParser(prog="matrix", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"rewrite {PAGE.name}")
    parser.add_argument("--raw", metavar="ROW", help="print all that is found in one place")
    options = parser.parse_args()
    if options.raw:
        print(json.dumps(look(options.raw), indent=1))
        return 0
    for name in ROWS:
        if (reason := lacking(name)) is not None:
            parser.error(reason)
    made = table(tuple(ROWS))
    print(made)
    if options.write:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        PAGE.write_text(before + BEGIN + made + END + rest.partition(END)[2], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
