"""Seccomp profiles of containers, as data: the engines' default one, and one for nested sandboxes.

``RuntimeDefault`` of Docker, containerd and CRI-O is an allow-list. Which calls it has depends on
the architecture and on the capabilities of the container. ``nested_profile()`` is that list with
the calls by which the launcher makes namespaces and mounts. Kubernetes loads its JSON as a
``Localhost`` profile.

``python -m union.sandbox._seccomp.container_profile`` prints that JSON. It needs no privilege.
"""

from __future__ import annotations

import json
import sys
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["default_profile", "nested_profile", "profile_text"]

_ARCHITECTURES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "x86_64": ("SCMP_ARCH_X86_64", "SCMP_ARCH_X86", "SCMP_ARCH_X32"),
        "aarch64": ("SCMP_ARCH_AARCH64", "SCMP_ARCH_ARM"),
    }
)

# Calls that every container may make, by topic. The engines' documentation lists them by name; the
# runtime ignores names that an architecture or its libseccomp does not know.
_ALWAYS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "files": """
            open openat openat2 creat close close_range read write readv writev pread64 pwrite64
            preadv pwritev preadv2 pwritev2 lseek dup dup2 dup3 fcntl flock ioctl truncate ftruncate
            fallocate fsync fdatasync sync syncfs sync_file_range readahead fadvise64 sendfile
            copy_file_range splice tee vmsplice umask
        """,
        "names and directories": """
            access faccessat faccessat2 chdir fchdir getcwd mkdir mkdirat rmdir rename renameat
            renameat2 link linkat symlink symlinkat readlink readlinkat unlink unlinkat mknod
            mknodat getdents getdents64 name_to_handle_at
        """,
        "metadata": """
            stat fstat lstat newfstatat statx statfs fstatfs chmod fchmod fchmodat fchmodat2 chown
            fchown lchown fchownat utime utimes futimesat utimensat
            getxattr lgetxattr fgetxattr getxattrat listxattr llistxattr flistxattr listxattrat
            setxattr lsetxattr fsetxattr setxattrat removexattr lremovexattr fremovexattr
            removexattrat
        """,
        "watching": """
            inotify_init inotify_init1 inotify_add_watch inotify_rm_watch fanotify_mark listmount
            statmount
        """,
        "memory": """
            brk mmap munmap mremap mprotect msync madvise mincore mlock mlock2 munlock mlockall
            munlockall mseal remap_file_pages membarrier memfd_create memfd_secret cachestat
            pkey_alloc pkey_free pkey_mprotect map_shadow_stack
        """,
        "processes": """
            fork vfork execve execveat exit exit_group wait4 waitid getpid getppid gettid getpgid
            getpgrp setpgid getsid setsid pidfd_open pidfd_send_signal process_mrelease prctl
            set_tid_address set_robust_list get_robust_list rseq restart_syscall uretprobe
            set_thread_area get_thread_area seccomp landlock_create_ruleset landlock_add_rule
            landlock_restrict_self ptrace process_vm_readv process_vm_writev
        """,
        "ids and capabilities": """
            getuid geteuid getgid getegid getresuid getresgid getgroups setuid setgid setreuid
            setregid setresuid setresgid setfsuid setfsgid setgroups capget capset
        """,
        "signals": """
            kill tkill tgkill pause alarm rt_sigaction rt_sigprocmask rt_sigpending rt_sigsuspend
            rt_sigtimedwait rt_sigqueueinfo rt_tgsigqueueinfo rt_sigreturn sigaltstack signalfd
            signalfd4
        """,
        "scheduling and limits": """
            sched_yield sched_getaffinity sched_setaffinity sched_getattr sched_setattr
            sched_getparam sched_setparam sched_getscheduler sched_setscheduler
            sched_get_priority_max sched_get_priority_min sched_rr_get_interval getcpu getpriority
            setpriority ioprio_get ioprio_set getrlimit setrlimit prlimit64 getrusage times
        """,
        "time": """
            time gettimeofday nanosleep clock_gettime clock_getres clock_nanosleep clock_adjtime
            adjtimex getitimer setitimer timer_create timer_settime timer_gettime timer_getoverrun
            timer_delete timerfd_create timerfd_settime timerfd_gettime
        """,
        "waiting": """
            poll ppoll select pselect6 epoll_create epoll_create1 epoll_ctl epoll_ctl_old epoll_wait
            epoll_wait_old epoll_pwait epoll_pwait2 eventfd eventfd2 pipe pipe2 futex futex_wait
            futex_wake futex_waitv futex_requeue
        """,
        "sockets": """
            socketpair bind listen accept accept4 connect shutdown getsockname getpeername
            getsockopt setsockopt sendto sendmsg sendmmsg recvfrom recvmsg recvmmsg
        """,
        "System V and POSIX queues": """
            semget semop semtimedop semctl shmget shmat shmdt shmctl msgget msgsnd msgrcv msgctl
            mq_open mq_unlink mq_timedsend mq_timedreceive mq_notify mq_getsetattr
        """,
        "asynchronous input and output": """
            io_setup io_submit io_cancel io_destroy io_getevents io_pgetevents
        """,
        "the system": "uname sysinfo getrandom",
        "spellings of 32-bit architectures": """
            _llseek _newselect chown32 fchown32 lchown32 clock_adjtime64 clock_getres_time64
            clock_gettime64 clock_nanosleep_time64 fadvise64_64 fcntl64 fstat64 fstatat64 fstatfs64
            ftruncate64 futex_time64 getegid32 geteuid32 getgid32 getgroups32 getresgid32
            getresuid32 getuid32 io_pgetevents_time64 ipc lstat64 mmap2 mq_timedreceive_time64
            mq_timedsend_time64 ppoll_time64 pselect6_time64 recv recvmmsg_time64
            rt_sigtimedwait_time64 sched_rr_get_interval_time64 semtimedop_time64 send sendfile64
            setfsgid32 setfsuid32 setgid32 setgroups32 setregid32 setresgid32 setresuid32 setreuid32
            setuid32 sigprocmask sigreturn socketcall stat64 statfs64 timer_gettime64
            timer_settime64 timerfd_gettime64 timerfd_settime64 truncate64 ugetrlimit
            utimensat_time64 waitpid
        """,
    }
)
_BY_MACHINE: Final[Mapping[str, str]] = MappingProxyType(
    {
        "x86_64": "arch_prctl modify_ldt",
        "aarch64": "arm_fadvise64_64 arm_sync_file_range sync_file_range2 breakpoint cacheflush "
        "set_tls",
    }
)
_BY_CAPABILITY: Final[Mapping[str, str]] = MappingProxyType(
    {
        "CAP_BPF": "bpf",
        "CAP_DAC_READ_SEARCH": "open_by_handle_at",
        "CAP_PERFMON": "perf_event_open",
        "CAP_SYS_ADMIN": "bpf clone clone3 fanotify_init fsconfig fsmount fsopen fspick "
        "lookup_dcookie lsm_get_self_attr lsm_list_modules lsm_set_self_attr mount mount_setattr "
        "move_mount open_tree perf_event_open quotactl quotactl_fd setdomainname sethostname "
        "setns syslog umount umount2 unshare",
        "CAP_SYS_BOOT": "reboot",
        "CAP_SYS_CHROOT": "chroot",
        "CAP_SYS_MODULE": "delete_module init_module finit_module",
        "CAP_SYS_NICE": "get_mempolicy mbind set_mempolicy set_mempolicy_home_node",
        "CAP_SYS_PACCT": "acct",
        "CAP_SYS_PTRACE": "kcmp pidfd_getfd process_madvise",
        "CAP_SYS_RAWIO": "iopl ioperm",
        "CAP_SYS_TIME": "settimeofday stime clock_settime clock_settime64",
        "CAP_SYS_TTY_CONFIG": "vhangup",
        "CAP_SYSLOG": "syslog",
    }
)
_NESTED: Final = (
    "clone setns unshare mount umount umount2 pivot_root open_tree move_mount mount_setattr "
    "sethostname"
)
"""How the launcher makes namespaces and mounts. bwrap needs no other."""
_NEW_NAMESPACES: Final = 0x7E02_0000
"""Flags of ``clone`` that make a namespace."""
_REFUSED_FAMILIES: Final = (38, 40)
"""AF_ALG and AF_VSOCK."""
_PERSONALITIES: Final = (0x0, 0x8, 0x2_0000, 0x2_0008, 0xFFFF_FFFF)
"""Linux, Linux with 32-bit addresses, both with the version of Linux 2.6, and asking."""
_EPERM, _ENOSYS = 1, 38


def _allow(names: Iterable[str], *conditions: dict[str, Any]) -> dict[str, Any]:
    rule: dict[str, Any] = {"names": sorted(set(names)), "action": "SCMP_ACT_ALLOW"}
    return rule | ({"args": list(conditions)} if conditions else {})


def _argument(index: int, op: str, value: int, two: int = 0) -> dict[str, Any]:
    return {"index": index, "value": value, "valueTwo": two, "op": f"SCMP_CMP_{op}"}


def _sockets() -> list[dict[str, Any]]:
    """Allow every family between the refused ones: a rule has one comparison of an argument."""
    first, last = _REFUSED_FAMILIES[0], _REFUSED_FAMILIES[-1]
    between = set(range(first, last)) - set(_REFUSED_FAMILIES)
    return [
        _allow(["socket"], _argument(0, "LT", first)),
        *(_allow(["socket"], _argument(0, "EQ", family)) for family in sorted(between)),
        _allow(["socket"], _argument(0, "GT", last)),
    ]


def default_profile(
    *, machine: str, capabilities: Iterable[str] = (), also: str = ""
) -> dict[str, Any]:
    """Return ``RuntimeDefault`` for a container, in the format of the OCI runtime.

    Args:
        machine: the architecture, ``x86_64`` or ``aarch64``.
        capabilities: the capabilities of the container, with ``CAP_``. Default: none.
        also: further calls to allow, separated by spaces. Default: none.

    """
    names = " ".join((*_ALWAYS.values(), _BY_MACHINE[machine], also)).split()
    for capability in capabilities:
        names += _BY_CAPABILITY.get(capability, "").split()
    rules = [_allow(names), *_sockets()]
    rules += [_allow(["personality"], _argument(0, "EQ", one)) for one in _PERSONALITIES]
    if "clone" not in names:
        rules.append(_allow(["clone"], _argument(0, "MASKED_EQ", _NEW_NAMESPACES)))
    if "clone3" not in names:
        # ENOSYS makes the C library fall back to clone, whose flags a filter can read.
        rules.append({"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": _ENOSYS})
    return {
        "defaultAction": "SCMP_ACT_ERRNO",
        "defaultErrnoRet": _EPERM,
        "architectures": list(_ARCHITECTURES[machine]),
        "syscalls": rules,
    }


def nested_profile(*, machine: str) -> dict[str, Any]:
    """Return ``RuntimeDefault`` with the calls that ``userns`` and ``bubblewrap`` need."""
    return default_profile(machine=machine, also=_NESTED)


def profile_text() -> str:
    """Return ``nested_profile()`` as JSON, for nodes of every supported architecture."""
    profile = nested_profile(machine="x86_64")
    names = {*profile["syscalls"][0]["names"], *_BY_MACHINE["aarch64"].split()}
    profile["syscalls"][0]["names"] = sorted(names)
    profile["architectures"] = [one for each in _ARCHITECTURES.values() for one in each]
    return json.dumps(profile, indent=2) + "\n"


if __name__ == "__main__":
    sys.stdout.write(profile_text())
