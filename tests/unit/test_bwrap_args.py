"""A plan is divided into bwrap arguments and runner steps without losing any step."""

from __future__ import annotations

import re

import pytest

from union.sandbox._backends.base import Identity, Setting, Wrapper
from union.sandbox._backends.bubblewrap import Bubblewrap
from union.sandbox._backends.userns import Userns
from union.sandbox._plan import plan as p
from union.sandbox._plan.bwrap_args import NEEDED, divide, namespace_args, staged
from union.sandbox._plan.rootfs import NetworkFile, Shown, View

VIEW = View(
    system=(Shown(source="/usr", path="/usr"),),
    links=(("/bin", "usr/bin"),),
    files=(("/etc/hosts", b"127.0.0.1 localhost\n"),),
    network_files=(NetworkFile(network="open", path="/etc/hosts", source="/etc/hosts"),),
    added=(
        Shown(source="/real/data", path="/data"),
        Shown(source="/srv/work", path="/srv/work", writable=True, idmap=0, identity=(8, 99)),
    ),
    fresh_proc=True,
    guarded_proc=(),
    staging="/tmp",
    pivot=True,
    tmp_bytes=1 << 20,
    shm_bytes=1 << 20,
)
ROOT = Identity(
    uid=1000, gid=1000, host_uid=77, host_gid=78, kind="unprivileged", deny_setgroups=False
)


def setting(way: str, *, share: bool = False, network: str = "blocked") -> Setting:
    return Setting(
        view=VIEW,
        identity=ROOT,
        network=network,  # type: ignore[arg-type]  # one of its values
        network_steps=() if network == "open" else (p.Netlink(0, b"up", 1),),
        egress="kernel",
        landlock_abi=1,
        seccomp=b"filter!!",
        wrapper=Wrapper(program="/usr/bin/bwrap", mode=way),  # type: ignore[arg-type]
        share=share,
    )


def wrap_of(plan: p.Plan) -> p.Wrap:
    last = plan.steps[-1]
    assert isinstance(last, p.Wrap)
    return last


# The order is the policy: the complete arguments of bwrap for the view above.
GOLDEN = """
--unshare-user --unshare-pid --unshare-ipc --unshare-uts --unshare-cgroup --unshare-net
--uid 1000 --gid 1000 --as-pid-1
--cap-drop ALL --cap-add CAP_SYS_ADMIN --cap-add CAP_SETPCAP
--cap-add CAP_NET_ADMIN --cap-add CAP_NET_BIND_SERVICE
--ro-bind /usr /usr
--symlink usr/bin /bin
--dir /etc
--dir /dev
--dev-bind /dev/null /dev/null --dev-bind /dev/zero /dev/zero --dev-bind /dev/full /dev/full
--dev-bind /dev/random /dev/random --dev-bind /dev/urandom /dev/urandom
--dev-bind /dev/tty /dev/tty
--symlink /proc/self/fd /dev/fd --symlink /proc/self/fd/0 /dev/stdin
--symlink /proc/self/fd/1 /dev/stdout --symlink /proc/self/fd/2 /dev/stderr
--symlink pts/ptmx /dev/ptmx --dir /dev/pts
--dir /proc --proc /proc
"""


def test_the_arguments_of_bwrap() -> None:
    args = wrap_of(Bubblewrap().plan(setting("caller"))).args
    golden = GOLDEN.split()
    assert list(args[: len(golden)]) == golden
    rest = " ".join(args[len(golden) :])
    assert rest.count("--tmpfs") == 3
    assert "--ro-bind /real/data /data" in rest
    assert "--bind /srv/work /srv/work" in rest
    assert rest.endswith("--hostname sandbox")


def test_the_steps_of_the_runner_end_with_the_filter() -> None:
    inside = wrap_of(Bubblewrap().plan(setting("caller"))).inside
    kinds = [type(step).__name__ for step in inside]
    landlock = ["LandlockCreate", *["LandlockPath"] * 5, "LandlockRestrict"]
    assert kinds[kinds.index("Netlink") :] == ["Netlink", "Lockdown", *landlock, "Seccomp"]
    assert inside[-1] == p.Seccomp(b"filter!!")


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("way", ["caller", "entered", "nested"])
def test_both_backends_build_the_same(way: str, *, share: bool) -> None:
    """Every step of ``userns`` is an argument, a step inside, or something bwrap does anyway."""
    by_bwrap = Bubblewrap().plan(setting(way, share=share))
    direct = Userns().plan(setting(way, share=share))
    if share:
        assert by_bwrap.steps == direct.steps, "what each sandbox does for itself"
        assert by_bwrap.shared is not None
        assert direct.shared is not None
        by_bwrap, direct = by_bwrap.shared, direct.shared
    wrap = wrap_of(by_bwrap)
    args = " ".join(wrap.args)
    for step in direct.steps:
        match step:
            case p.Bind():
                source = step.source if way == "caller" else r"/tmp/\d+"
                assert re.search(rf"bind {source} {step.path}( |$)", args), step
            case p.Mkdir() | p.Symlink() | p.Proc():
                assert f" {step.path}" in args
            case p.Hostname():
                assert f"--hostname {step.path}" in args
            case p.Tmpfs():
                assert f"--tmpfs {step.path}" in args
                assert p.Resize(step.path, step.mode, step.options) in wrap.inside
            case p.Root():
                assert p.Resize("/", 0o755, step.options) in wrap.inside
            case p.Enter() | p.Detach():
                pass
            case _:
                assert step in wrap.inside, step


@pytest.mark.parametrize("backend", [Userns(), Bubblewrap()])
def test_one_shared_part_serves_every_network(backend: Userns) -> None:
    blocked, filtered, opened = (
        backend.plan(setting("caller", share=True, network=network))
        for network in ("blocked", "filtered", "open")
    )
    assert blocked.shared is not None
    assert blocked.shared == filtered.shared == opened.shared
    cover = p.Cover("/etc/hosts", "/run/sandbox/open-hosts")
    assert [cover in plan.steps for plan in (blocked, filtered, opened)] == [False, False, True]


def test_a_mount_point_of_the_caller_is_left_to_the_runner() -> None:
    """bwrap would create a missing one; it only mounts the source, in the private root."""
    outer = p.Bind("/srv/work", "/srv/work", p.NOSUID | p.NODEV)
    inner = p.Bind("/srv/work/a", "/srv/work/a", identity=(8, 9), existing=True)
    again = p.Bind("/srv/work/b", "/srv/work/b", existing=True)
    args, inside = divide([outer, inner, again])
    at = "/run/staged"
    assert (
        args
        == (
            f"--bind /srv/work /srv/work --ro-bind /srv/work/a {at}/0 --ro-bind /srv/work/b {at}/1"
        ).split()
    )
    cover, first, second = inside
    assert isinstance(cover, p.Tmpfs)
    assert (cover.path, cover.read_only) == (at, True)
    assert first == p.Bind(f"{at}/0", "/srv/work/a", identity=(8, 9), existing=True)
    assert second == p.Bind(f"{at}/1", "/srv/work/b", existing=True)
    _, after = staged([inner], "/tmp")
    assert after == (p.Bind("/tmp/1", "/srv/work/a", existing=True),)


def test_every_used_option_is_in_the_list_of_needed_ones() -> None:
    for way in ("caller", "entered", "nested"):
        used = {a for a in wrap_of(Bubblewrap().plan(setting(way))).args if a.startswith("--")}
        assert used <= {*NEEDED, "--userns"}, way
        assert ("--userns" in used) == (way == "entered")


def test_flags_that_bwrap_has_no_option_for_are_added_inside() -> None:
    device = p.Bind("/dev/null", "/dev/null", p.RDONLY | p.NOSUID | p.NOEXEC)
    args, inside = divide([device])
    assert args == ["--dev-bind", "/dev/null", "/dev/null"]
    assert inside == (p.Attrs("/dev/null", p.RDONLY | p.NOEXEC),)
    proc = p.Bind("/proc", "/proc", p.NOSUID | p.NODEV | p.NOEXEC)
    assert divide([proc]) == (["--bind", "/proc", "/proc"], (p.Attrs("/proc", p.NOEXEC),))


def test_the_work_dir_is_checked_where_it_is_found_by_name() -> None:
    plan = Bubblewrap().plan(setting("caller"))
    assert p.Identity("/srv/work", (8, 99)) in wrap_of(plan).inside
    assert plan.clone_flags == 0
    assert plan.uid is None


@pytest.mark.parametrize("way, flags", [("entered", 0x00020000), ("nested", 0x10020000)])
def test_for_root_every_source_is_staged_first(way: str, flags: int) -> None:
    """By the launcher, with the caller's rights and as id-mapped mounts; bwrap needs neither."""
    plan = Bubblewrap().plan(setting(way))
    assert plan.clone_flags == flags
    before, args = plan.steps[:-1], wrap_of(plan).args
    sources = [
        args[i + 1] for i, a in enumerate(args) if re.fullmatch("--(ro-|dev-)?bind", a) is not None
    ]
    assert sources == [step.path for step in before if isinstance(step, p.Bind)]
    assert all(re.fullmatch(r"/tmp/\d+", source) for source in sources)
    (work,) = (step for step in before if isinstance(step, p.Bind) and step.idmap is not None)
    assert (work.source, work.identity) == ("/srv/work", (8, 99))
    assert not any(isinstance(step, p.Identity) for step in wrap_of(plan).inside), "done before"


def test_for_root_the_ids_are_those_of_the_sandbox() -> None:
    entered, nested = (Bubblewrap().plan(setting(way)) for way in ("entered", "nested"))
    assert wrap_of(entered).enter == ((1000, 77), (1000, 78))
    assert wrap_of(entered).integers() == (1, 1000 << 32 | 77, 1000 << 32 | 78)
    assert (entered.uid, entered.gid) == (None, None)
    assert wrap_of(nested).enter is None
    assert (nested.uid, nested.gid, nested.deny_setgroups) == ((1000, 77), (1000, 78), False)


def test_with_the_host_network_no_network_capability_is_requested() -> None:
    args = wrap_of(Bubblewrap().plan(setting("caller", network="open"))).args
    assert "--unshare-net" not in args
    assert "CAP_NET_ADMIN" not in args
    assert "CAP_SYS_ADMIN" in args


def test_names_that_are_not_utf8_pass_unchanged() -> None:
    odd = "/a b\n\udcff--bind"
    wrap = p.Wrap("/usr/bin/bwrap", ("--dir", odd), ())
    assert wrap.blobs()[0] == b"/usr/bin/bwrap\0--dir\0/a b\n\xff--bind\0"


def test_staging_leaves_all_but_binds_alone() -> None:
    before, after = staged([p.Mkdir("/x"), p.Bind("/s", "/d")], "/tmp")
    assert [type(s).__name__ for s in before] == ["Tmpfs", "Bind"]
    assert after == (p.Mkdir("/x"), p.Bind("/tmp/1", "/d"))


def test_an_existing_namespace_is_entered_and_not_created() -> None:
    args = namespace_args(namespaces=("user", "mount", "pid"), uid=5, gid=6, enter_userns=True)
    assert args[:3] == ["--userns", "7", "--unshare-pid"]
    assert "--unshare-user" not in args
