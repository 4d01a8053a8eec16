"""The feature floor: sessions on this machine with one feature of the kernel switched off.

System calls are switched off by a seccomp filter around the host process, as on an older kernel or
under a container's profile; mounts and programs by a mount namespace of the process.

By hand: `python -m tests.environments.floor` prints the table, `--write` puts it into its page.
"""

from __future__ import annotations

import argparse
import errno
import functools
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from typing import Any

from tests.environments.suite import PROJECT, user_venv

from union.sandbox._plan.bwrap_args import NEEDED
from union.sandbox._seccomp import bpf

PAGE = PROJECT / "docs" / "reference" / "requirements.md"
BEGIN, END = "<!-- floor: begin -->\n", "<!-- floor: end -->\n"
LIMIT_S = 120.0
BACKENDS = ("userns", "bubblewrap", "landlock")
NEW_USER, NEW_CGROUP = 0x1000_0000, 0x0200_0000
NEW_LISTENER = 8
NETFILTER = 12
PR_SET_SECCOMP = 22
NUMBERS: dict[str, int | tuple[int, int]] = {
    "clone": (56, 220),
    "clone3": 435,
    "close_range": 436,
    "fsopen": 430,
    "landlock_create_ruleset": 444,
    "landlock_add_rule": 445,
    "landlock_restrict_self": 446,
    "mount_setattr": 442,
    "move_mount": 429,
    "open_tree": 428,
    "openat2": 437,
    "pidfd_open": 434,
    "pivot_root": (155, 41),
    "prctl": (157, 167),
    "process_vm_readv": (310, 270),
    "seccomp": (317, 277),
    "socket": (41, 198),
    "unshare": (272, 97),
}
"""Of x86_64 and aarch64; newer calls have one number everywhere."""
ALLOWLIST = {"network_mode": "allowlist", "network_allowlist": ["example.com"]}

LOOK = """\
import asyncio, ctypes, json, os, sys, warnings

class Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))

options, backends, code = json.loads(sys.argv[1]), sys.argv[2].split(), bytes.fromhex(sys.argv[3])
if code:
    libc, zero = ctypes.CDLL(None, use_errno=True), ctypes.c_ulong(0)
    if os.geteuid() != 0:
        libc.prctl(38, ctypes.c_ulong(1), zero, zero, zero)
    wanted = Program(len(code) // 8, code)
    if libc.prctl(22, ctypes.c_ulong(2), ctypes.byref(wanted), zero, zero) != 0:
        sys.exit(f"the filter was refused: {os.strerror(ctypes.get_errno())}")

from union import sandbox as sb

warnings.simplefilter("ignore")
takes_checkpoint = options.pop("checkpoint", False)
if "host_work_dir" in options:
    options["host_work_dir"] = os.path.expandvars(options["host_work_dir"])
    os.makedirs(options["host_work_dir"], exist_ok=True)
if "resources" in options:
    options["resources"] = sb.Resources(**options["resources"])

async def opened(backend, **more):
    try:
        async with sb.on_device.session(backend=backend, **options, **more) as sbx:
            done = await sbx.exec("ln -sfn /etc leads && echo inside")
            try:
                followed = [entry.path for entry in await sbx.list_dir("leads")]
            except sb.SandboxError:
                followed = []
            if takes_checkpoint:
                kept = await sbx.checkpoint()
                await sbx.exec("echo changed > new")
                await sbx.rollback(kept)
                assert not await sbx.exists("new")
            report = sbx.isolation.to_dict()
            return {"isolation": report, "stdout": done.stdout, "followed": followed}
    except sb.SandboxError as error:
        return {"code": error.code, "message": str(error.args[0]), "hint": error.hint}

async def main():
    return {name: {"plain": await opened(name), "strict": await opened(name, strict=True)}
            for name in backends}

print(json.dumps(asyncio.run(main())))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A system call that fails, always or with one argument only."""

    call: str
    error: int = errno.ENOSYS
    argument: int = 0
    bits: int | None = None
    """The call fails only if `argument` has one of these bits."""
    value: int | None = None
    """The call fails only if `argument` has this value."""

    def node(self, other: bpf.Node) -> bpf.Node:
        """Return the decision, `other` if this is not the call."""
        verdict = bpf.Return(0x0005_0000 | self.error)
        then: bpf.Node = verdict
        if self.bits is not None:
            test = bpf.Branch(bpf.JSET, self.bits, verdict, bpf.ALLOW)
            then = bpf.Load(bpf.LOW[self.argument], test)
        elif self.value is not None:
            test = bpf.Branch(bpf.JEQ, self.value, verdict, bpf.ALLOW)
            then = bpf.Load(bpf.LOW[self.argument], test)
        number = NUMBERS[self.call]
        if isinstance(number, tuple):
            number = number[("x86_64", "aarch64").index(platform.machine())]
        return bpf.Branch(bpf.JEQ, number, then, other)


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """A feature, and how it is switched off."""

    title: str
    refused: tuple[Refused, ...] = ()
    script: str = ""
    """Shell commands in a mount namespace, before the program starts; `$SCRATCH` is a directory."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of the sessions, where the feature matters to some only."""

    def filter(self) -> bytes:
        """Return the program of the filter; empty if there is none."""
        node: bpf.Node = bpf.ALLOW
        for refused in self.refused:
            node = refused.node(node)
        return bpf.assemble(bpf.Load(bpf.NR, node)) if self.refused else b""


def _calls(*names: str, error: int = errno.ENOSYS) -> tuple[Refused, ...]:
    return tuple(Refused(call=name, error=error) for name in names)


_OLD_BWRAP = f"""\
cp "$(command -v bwrap)" "$SCRATCH/real"
cat >"$SCRATCH/old" <<END
#!/bin/sh
case "\\$1" in
--version) echo "bubblewrap 0.3.3" ;;
--help) "$SCRATCH/real" --help | sed 's/{NEEDED[0]}\\b/--other/g' ;;
*) exec "$SCRATCH/real" "\\$@" ;;
esac
END
chmod 755 "$SCRATCH/old"
mount --bind "$SCRATCH/old" "$(command -v bwrap)"
"""
FEATURES = {
    "landlock": Feature(
        title="Landlock (5.13)",
        refused=_calls("landlock_create_ruleset", "landlock_add_rule", "landlock_restrict_self"),
    ),
    "openat2": Feature(title="`openat2` (5.6)", refused=_calls("openat2")),
    "pidfd": Feature(title="`pidfd_open` (5.3)", refused=_calls("pidfd_open")),
    "close-range": Feature(title="`close_range` (5.9)", refused=_calls("close_range")),
    "mount-setattr": Feature(title="`mount_setattr` (5.12)", refused=_calls("mount_setattr")),
    "open-tree": Feature(
        title="`open_tree`, `move_mount` (5.2)", refused=_calls("open_tree", "move_mount")
    ),
    "pivot-root": Feature(title="`pivot_root`", refused=_calls("pivot_root", error=errno.EPERM)),
    "user-namespaces": Feature(
        title="user namespaces",
        refused=(
            Refused(call="clone", error=errno.EPERM, bits=NEW_USER),
            Refused(call="unshare", error=errno.EPERM, bits=NEW_USER),
            *_calls("clone3"),
        ),
    ),
    "cgroup-namespaces": Feature(
        title="cgroup namespaces (4.6)",
        refused=(
            Refused(call="clone", error=errno.EINVAL, bits=NEW_CGROUP),
            Refused(call="unshare", error=errno.EINVAL, bits=NEW_CGROUP),
        ),
    ),
    "seccomp": Feature(
        title="seccomp filters",
        refused=(
            *_calls("seccomp"),
            Refused(call="prctl", error=errno.EINVAL, value=PR_SET_SECCOMP),
        ),
    ),
    "notification": Feature(
        title="seccomp notifications (5.0)",
        refused=(Refused(call="seccomp", error=errno.EINVAL, argument=1, bits=NEW_LISTENER),),
    ),
    "process-vm-readv": Feature(title="`process_vm_readv`", refused=_calls("process_vm_readv")),
    "nf-tables": Feature(
        title="nf_tables, with an allow-list",
        refused=(Refused(call="socket", error=errno.EPROTONOSUPPORT, argument=2, value=NETFILTER),),
        options=ALLOWLIST,
    ),
    "cgroups": Feature(
        title="writable control groups, with a memory limit",
        script="for each in $(grep -o ' /sys/fs/cgroup[^ ]*' /proc/self/mounts | sort -u); do\n"
        'mount -o remount,bind,ro "$each"\ndone\n',
        options={"resources": {"memory": "256Mi"}},
    ),
    "id-mapped-mounts": Feature(
        title="id-mapped mounts, with `host_work_dir=`",
        script='mkdir "$SCRATCH/work"\nmount -t ramfs ramfs "$SCRATCH/work"\n',
        options={"host_work_dir": "$SCRATCH/work"},
    ),
    # The launcher uses the call for overlays only; a kernel without them answers so.
    "overlay": Feature(
        title="overlays in user namespaces (5.11), with a checkpoint",
        refused=_calls("fsopen", error=errno.ENODEV),
        options={"checkpoint": True},
    ),
    "bwrap": Feature(title="an option of `bwrap`, as before 0.5", script=_OLD_BWRAP),
}


def lacking(name: str) -> str | None:
    """Return what this machine lacks to switch a feature off, or None."""
    if os.geteuid() != 0:
        return "control groups and an id for each session need root: run the tests as root"
    if FEATURES[name].script and shutil.which("unshare") is None:
        return "unshare is not installed: apt-get install util-linux"
    return None


def look(name: str) -> dict[str, Any]:
    """Return the results of sessions without a feature, by its name."""
    return look_without(FEATURES[name])


def look_without(feature: Feature) -> dict[str, Any]:
    """Return the results of sessions without a feature."""
    program = [
        str(user_venv() / "bin" / "python"),
        "-c",
        LOOK,
        json.dumps(feature.options),
        " ".join(BACKENDS),
    ]
    command = [*program, feature.filter().hex()]
    with tempfile.TemporaryDirectory(prefix="sbx-floor-", dir="/var/tmp") as scratch:
        os.chmod(scratch, 0o755)
        if feature.script:
            script = f'set -eu\n{feature.script}exec "$@"\n'
            command = ["unshare", "--mount", "sh", "-c", script, "sh", *command]
        done = subprocess.run(
            command,
            check=False,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            env={**os.environ, "SCRATCH": scratch},
        )
    if done.returncode != 0:
        raise RuntimeError(
            f"{feature.title}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


_NOT_COMPARED = frozenset({"backend", "seccomp"})
"""The digest of a filter differs with what it is adapted to."""


def differences(complete: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Return the parts of a report that are weaker without the feature."""
    limits = {f"limits.{key}": value for key, value in found["limits"].items()}
    before = {f"limits.{key}": value for key, value in complete["limits"].items()}
    now = {**found, **limits}
    changed = []
    for key, value in {**complete, **before}.items():
        if key not in _NOT_COMPARED and key != "limits" and now.get(key) != value:
            shown = now.get(key)
            changed.append(f"{key.rpartition('.')[2]} {_shown(shown)}")
    return changed


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(value) or "none"
    return (
        {True: "yes", False: "no"}.get(value, str(value)) if isinstance(value, bool) else str(value)
    )


def cell(complete: dict[str, Any], found: dict[str, Any]) -> str:
    """Return one result for the table."""
    if "isolation" not in found:
        cause = found["message"].partition(" here: ")[2] or found["message"]
        return f"refused: {cause.partition(' (')[0]}"
    changed = differences(complete["isolation"], found["isolation"])
    return "; ".join(changed) if changed else "the same"


HEAD = (
    "| without | "
    + " | ".join(f"`{name}`" for name in BACKENDS)
    + " | `userns`, `strict=True` |\n|---|"
    + "---|" * (len(BACKENDS) + 1)
    + "\n"
)


def complete_for(name: str) -> dict[str, Any]:
    """Return the results with every feature, for sessions with the same options."""
    return _complete(json.dumps(FEATURES[name].options))


@functools.cache
def _complete(options: str) -> dict[str, Any]:
    return look_without(Feature(title="", options=json.loads(options)))


def line(name: str, found: dict[str, Any]) -> str:
    """Return the row of the table."""
    complete = complete_for(name)
    cells = [cell(complete[backend]["plain"], found[backend]["plain"]) for backend in BACKENDS]
    cells.append(cell(complete["userns"]["strict"], found["userns"]["strict"]))
    return f"| {FEATURES[name].title} | " + " | ".join(cells) + " |\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="floor", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"rewrite {PAGE.name}")
    parser.add_argument("--raw", metavar="FEATURE", help="print all that is found without one")
    options = parser.parse_args()
    if options.raw:
        print(json.dumps(look(options.raw), indent=1))
        return 0
    made = HEAD + "".join(line(name, look(name)) for name in FEATURES)
    print(made)
    if options.write:
        text = PAGE.read_text(encoding="utf-8")
        before, _, rest = text.partition(BEGIN)
        _, _, after = rest.partition(END)
        PAGE.write_text(f"{before}{BEGIN}{made}{END}{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
