"""Numbered list of known attacks on sandboxes. A test names its rows: `@pytest.mark.threat(5)`.

A row without a test needs a reason in `NOT_APPLICABLE`. `python scripts/threats.py` generates
`docs/reference/threats.md` from this file and the marks.
"""

from __future__ import annotations

from dataclasses import dataclass

FILES = "File descriptors, programs and files of the host"
PROCESSES = "Processes, terminals, environment"
KERNEL = "Kernel surface"
NETWORK = "Network"
ENDS = "Resources and process lifetime"
SERVER = "Server"

# Row numbers never change, because tests name them. A new row takes the next free number.
_TITLES = {
    FILES: {
        1: "a descriptor that the owner left open is usable inside",
        2: "the working directory of a command leads out",
        3: "the launcher's or interpreter's file is overwritten through /proc",
        4: "a helper of the host loads code from the work dir",
        5: "a directory is replaced by a link while the host copies",
        6: "the last component of a copied path is a link",
        7: "the host changes mode or owner through a link",
        8: "`..`, doubled slashes and look-alike prefixes leave the work dir",
        9: "NUL, surrogates and overlong names are truncated or half processed",
        10: "a file of the host is hard-linked into the work dir",
        11: "a link in the work dir is followed out",
        12: "a FIFO, socket or device replaces an expected file",
        13: "a sparse or growing file exceeds the checked size",
        14: "an unusual file name has another meaning on the other side",
        15: "the removal of a work dir follows links",
        16: "a tree that is too deep or too wide is not removed",
        17: "the work dir itself is replaced",
        18: "a set-uid file is left for the host",
        19: "mode, owner, times or attributes of a hidden file are changed",
        20: "a file is truncated without being opened for writing",
        21: "inotify watches reveal file activity of the host",
        22: "/tmp or /dev/shm is shared",
        23: "private files of /etc are readable",
        24: "devices of the host can be opened",
        25: "a device node is made and opened",
        26: "a file handle from outside is opened inside",
        27: "a mount follows a planted link",
        28: "a read-only path can be changed",
        29: "the caller's own Python library is changed",
        30: "an installed file, edited in place, reaches another session",
        129: "the host executes a program that was found in a work dir",
        130: "a directory above a read-only path is renamed or replaced",
        131: "the host's own cleanup deletes a read-only path",
        132: "a read-only mount is lost when the caller replaces the file",
        133: "opening a session removes a directory of another owner",
        134: "an environment variable that names a file leads out of the work dir",
        135: "an inspection of the work dir follows links",
    },
    PROCESSES: {
        31: "processes of the host are listed",
        32: "a signal reaches the host or the supervisor",
        33: "memory of another process is read or written",
        34: "an open file of another process is obtained",
        35: "/proc entries of another process are readable",
        36: "limits, priority or CPU affinity of another process are changed",
        37: "a run observes another run",
        38: "System V or POSIX memory and queues are shared",
        39: "input is injected into the caller's terminal",
        40: "a terminal or console of the host is written to",
        41: "the caller's environment is inherited",
        42: "a secret of `env` appears on a command line",
        43: "variables of `env` affect a helper of the host",
        44: "a value that begins with a dash is parsed as an option",
        45: "the caller's standard input is read",
        46: "a poisoned venv affects the host or the next session",
        47: "Python of the host imports from the work dir",
        48: "tool configuration planted in the work dir affects the host",
        49: "files created by the product are replaced by links",
        50: "hooks and start-up files in the work dir are executed by the product",
        51: "policy is read again from a file that the sandbox can write",
        52: "a death signal is bound to a thread, or arrives too late",
        53: "a reused process id is killed",
        136: "a file lease stalls the host's open()",
        137: "a crash inside starts the host's core dump helper",
        138: "names of the caller's kernel keys are listed",
        139: "input is pushed into a terminal (TIOCSTI, TIOCLINUX)",
        140: "OOM score, real-time priority or nice value are inherited from the caller",
        141: "the ids of a sandbox are weakened after the session opened",
    },
    KERNEL: {
        54: "a new user namespace gives capabilities",
        55: "clone3 hides its flags from the filter",
        56: "the newer mount system calls are not filtered",
        57: "32-bit system calls have other numbers",
        58: "x32 system calls have other numbers",
        59: "io_uring bypasses the filter",
        60: "rare socket families reach rarely tested kernel code",
        61: "AF_VSOCK reaches the hypervisor and other sandboxes",
        62: "raw and packet sockets sniff and forge",
        63: "netlink beyond routing",
        64: "userfaultfd stalls the kernel",
        65: "bpf and performance events",
        66: "keyrings keep data for the next run",
        67: "modify_ldt and personality",
        68: "modules, kexec, reboot, swap, clocks, ports",
        69: "core_pattern and other kernel settings are written",
        70: "cgroup files are written",
        71: "the kernel is configured to run a helper program",
        72: "kernel memory, symbols or log are read",
        73: "a program executed from memory bypasses path rules",
        74: "a thread, a child or a start path has no filter",
        75: "the filter is so strict that legitimate programs fail",
    },
    NETWORK: {
        76: "a program ignores the proxy variables",
        77: "services on the host's loopback are reached, or ours from the host",
        78: "abstract Unix sockets of the host are reached",
        79: "Unix sockets of the host are reached by path",
        80: "DNS queries carry data out",
        81: "an empty list allows everything",
        82: "plain HTTP is not checked",
        83: "a second request on a connection is not checked",
        84: "filter and resolver read control characters in a name differently",
        85: "dots, case and brackets bypass a rule",
        86: "suffixes and wildcards match too much",
        87: "international spellings bypass a rule",
        88: "numbers in unusual bases spell a denied address",
        89: "an IPv4 address hides in an IPv6 one",
        90: "userinfo, fragment or backslash hide the host",
        91: "an allowed name resolves to an internal address",
        92: "a name changes its address after the check",
        93: "a cloud's metadata service is reached",
        94: "Host or TLS name differ from the connection's",
        95: "two framings of one request (request smuggling)",
        96: "another run or an unauthenticated client uses the proxy",
        97: "SOCKS BIND and UDP",
        98: "resources of a wider call are reused by a narrower one",
        99: "a misspelled mode means open",
        100: "half-open or huge requests block the proxy",
        161: "TRACE returns the upstream proxy's password",
        162: "an address that the host gained later leads to the server",
        163: "the TLS name is not checked after another record type",
        164: "a connection is passed to a run of a narrower network mode",
        172: "a call widens the network ceiling of its session",
        173: "the paths of one call exceed the rules of the session",
    },
    ENDS: {
        101: "a fork bomb",
        102: "memory is counted per process instead of per run",
        103: "scratch space uses up the host's memory",
        104: "one huge file",
        105: "endless output fills the host's memory",
        106: "unusual output deadlocks or is altered",
        107: "a process survives a timeout",
        108: "a process survives the run or the session",
        109: "a background child holds the pipe and blocks the call",
        110: "a process survives its owner",
        111: "a command kills its supervisor",
        112: "a huge environment, argument or script",
        113: "the host leaks descriptors, processes, mounts",
        114: "a missing layer is silently omitted",
        142: "a kernel counter shared with the host is exhausted",
        143: "sessions of root share one id and its counters",
        144: "memory that the watch does not count",
        145: "an exhausted kernel counter makes close() hang",
        146: "a process that cannot be killed stalls other sessions",
        147: "a sibling that holds an output pipe delays a timeout",
        148: "leftovers are removed in the event loop",
        149: "one session takes every thread of the process",
        150: "many runs together exceed the process limit",
        174: "a backend accepts a limit that it cannot enforce",
    },
    SERVER: {
        115: "calls without credentials are served",
        116: "the server listens on every interface by default",
        117: "a DNS name is made to point to the server (DNS rebinding)",
        118: "a web page of another site sends simple requests to the server",
        119: "the server's token is exposed",
        120: "sandboxed code calls its own server",
        121: "the server fetches a URL for the caller",
        122: "one call requests more than the session has",
        123: "oversized, invalid or garbled frames",
        124: "half-open connections",
        125: "a run continues after its client is gone",
        126: "runs continue after the server is gone, or report an invented exit",
        127: "after a restart, files are lost or served to another client",
        128: "a client requests more time than the session has",
        151: "a client's upstream proxy bypasses the network ceiling",
        152: "unauthenticated clients hold every connection",
        153: "silent TLS connections are not counted",
        154: "a key with few rights exhausts the server's memory",
        155: "slow name resolution delays other sessions",
        156: "egress connections of one session take every file descriptor",
        157: "the token appears in a log line or an error",
        158: "a forged announcement obtains the owner's key",
        159: "clients reconnect without back-off",
        160: "a hostile server exhausts or misleads its client",
        165: "an idempotency key returns the result of another caller",
        166: "a malformed header raises a traceback",
        167: "a secret file is readable or writable by others",
        168: "one session takes every run slot",
        169: "empty frames slow the server down",
        170: "work dirs of a server that crashed stay behind",
        171: "a session opens in a weaker place than requested",
        175: "closing a reference ends the session of its owner",
    },
}  # fmt: skip

NOT_APPLICABLE: dict[int, str] = {}
"""Rows that do not apply to this project, with the reason. No test may name them."""


@dataclass(frozen=True, slots=True)
class Threat:
    """One row of the catalogue."""

    number: int
    kind: str
    title: str


ROWS = {
    number: Threat(number, kind, title)
    for kind, titles in _TITLES.items()
    for number, title in titles.items()
}
