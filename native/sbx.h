/* Declarations shared by the launcher's files.
 *
 * Rules of this program:
 *  - It decides nothing. Python compiles a plan (plan.c decodes it) and the launcher performs it, step by step.
 *  - It reads nothing that sandboxed code wrote, and parses no text.
 *  - A step that fails ends the sandbox and is reported as (op, errno); there is no "best effort".
 *  - After the clone there is no allocation: all memory is static.
 *
 * _linux/protocol.py and _plan/plan.py hold the same numbers and structures; tests/unit/test_protocol.py compares them. */
#ifndef SBX_H
#define SBX_H

#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <unistd.h>

enum { MAX_STEPS = 768, MAX_FDS = 64, MAX_LISTENERS = 8, MAX_SLOTS = 2, MAX_MESSAGE = 131072, MAX_STRINGS = 65536 };

/* Exit codes of our own processes. The exit code of a command is never one of these: it is reported by MSG_EXITED. */
enum { EXIT_LAUNCHER = 2, EXIT_SANDBOX = 125, EXIT_NOT_EXECUTED = 126 };

/* A descriptor that is closed at the end of its scope, unless it is -1; errno is kept. */
static inline void close_scoped(const int *fd)
{
    int saved = errno;
    if (*fd >= 0)
        close(*fd);
    errno = saved;
}
#define SCOPED_FD __attribute__((cleanup(close_scoped))) int

/* Returns a scoped descriptor, which its scope then does not close. */
static inline int take_fd(int *fd)
{
    int taken = *fd;
    *fd = -1;
    return taken;
}

/* In a0 of OP_BIND: the target exists, and is not created. */
#define BIND_EXISTING (UINT64_C(1) << 63)
/* By mount(2) alone, for a kernel without mount_setattr (gVisor). The flags apply to this mount; the plan names those below. */
#define BIND_CLASSIC (UINT64_C(1) << 62)

/* Operations of a plan. The numbers are the wire format shared with _plan/plan.py. */
enum op {
    OP_BIND = 1,     /* a0 attrs, a1 dev, a2 ino (0: unchecked), a3 idmap index + 1 << 32 | source index + 1; source, target */
    OP_ROOT = 2,     /* mount point, tmpfs options: becomes the private root */
    OP_MKDIR = 3,    /* a0 mode; path */
    OP_FILE = 4,     /* a0 mode; path, bytes */
    OP_SYMLINK = 5,  /* target, path */
    OP_TMPFS = 6,    /* a0 mount flags; path, options */
    OP_PROC = 7,     /* path */
    OP_DEVPTS = 8,   /* path, options */
    OP_REMOUNT = 9,  /* a0 mount flags; path */
    OP_HOSTNAME = 10,/* name */
    OP_NETLINK = 11, /* a0 protocol, a1 acknowledgements to expect; bytes */
    OP_LISTEN = 12,  /* a0 domain, a1 type, a2 backlog; sockaddr bytes; the socket goes to the host */
    OP_SLOT = 13,    /* a0 mode; path: a file kept open for the script of the command */
    OP_LOCKDOWN = 14,/* a0 securebits: clears every capability set, sets no_new_privs */
    OP_LL_CREATE = 15, /* a0 handled fs, a1 handled net, a2 scopes, a3 size of the attribute structure */
    OP_LL_PATH = 16, /* a0 access, a1 dev, a2 ino (0: unchecked); path */
    OP_LL_RESTRICT = 17, /* a0 flags */
    OP_SECCOMP = 18, /* program bytes */
    OP_RLIMIT = 19,  /* a0 resource, a1 soft, a2 hard */
    OP_SUBREAPER = 20, /* for a sandbox without a pid namespace */
    OP_DETACH = 21,  /* unmounts the caller's root, which OP_ROOT kept for the kernel's checks */
    OP_IDENTITY = 22, /* a0 dev, a1 ino, a2 mounted; path: fails unless it is this file */
    OP_ATTRS = 23,   /* a0 attrs, added to the mount at path and to all mounts below it */
    OP_RESIZE = 24,  /* a0 mount flags, a1 mode; path, options: changes the limits of an existing tmpfs */
    OP_WRAP = 25,    /* a0 flags, a1 uid, a2 gid (inside << 32 | outside); program and its arguments, plan for inside */
    OP_ENTER = 26,   /* a0 0: by pivot_root, 1: moved over the caller's root, where pivot_root is refused */
    OP_COVER = 27,   /* path, and the file of the private root that is mounted over it */
    OP_COUNTER = 28, /* a0 value; a file of /proc/sys/user: a limit of this user namespace */
    OP_SHARE = 30,   /* a0 0: last but for OP_TREE, sends the namespaces that hold the mounts to the host, and ends this process;
                      * 1: sends all of them and /proc, and becomes the first process of a machine */
    OP_LAYERS = 32,  /* a0 attrs; parameters of a file system, its type: makes a mount, for OP_ATTACH */
    OP_ATTACH = 33,  /* a0 index + 1 of a descriptor, 0 for the mount of the last OP_LAYERS; path that exists */
    OP_TREE = 34,    /* path: a copy of the mounts there goes to the host, with those of OP_SHARE */
    OP_SOCKOPT = 31, /* a0 domain, a1 type, a2 protocol, a3 level << 32 | option; bytes: set on a socket that is closed again */
    /* For sandboxes without namespaces, whose runner stays outside the Landlock domain of its command. */
    OP_TERMINAL = 40, /* opens a terminal for the command, which cannot open one itself */
    OP_CONFINE = 41, /* the steps after this one are performed by the process of the command alone */
    OP_UNPRIVILEGED = 42, /* clears the capability sets, sets no_new_privs */
    OP_NICE = 43,    /* a0 added to the nice value */
    OP_MEDIATE = 44, /* a0 MEDIATE_ flags; program bytes that notify the runner, paths it may change (each with its NUL) */
    OP_TEMPLATE = 48, /* always last: arguments and environment (each with its NUL) of an interpreter that serves forks */
    OP_LAST = OP_TEMPLATE,
    /* Places where a sandbox can fail that are not steps of a plan. */
    OP_PLAN = 100, OP_CLONE = 101, OP_IDMAP = 102, OP_CGROUP = 103, OP_IDS = 104, OP_PRIVATE = 105, OP_FDS = 106,
    OP_REQUEST = 107, OP_SCRIPT = 108, OP_FORK = 109, OP_CHDIR = 110, OP_EXEC = 111, OP_STDIO = 112, OP_TTY = 113, OP_COPY = 114,
    OP_PROCESS = 115,
};

struct step {
    uint32_t op;
    uint32_t len[2];
    uint64_t a[4];
    const char *data[2];
};

/* plan.c: returns the number of steps, or -1 when the bytes are not exactly a plan. */
int plan_decode(const unsigned char *bytes, size_t size, struct step *steps, int max);
/* The indices of the descriptors that a bind refers to, -1 for none; returns -1 when an index is out of range. */
int bind_refs(const struct step *step, int nfds, int *source, int *idmap);

/* Messages. Host to launcher, on the control socket: */
enum { MSG_ATTACH = 1, MSG_USERNS = 2 };
/* Host to launcher, on a session's channel: */
enum { MSG_PREPARE = 10, MSG_KILL = 11, MSG_KILL_ALL = 12, MSG_BEGIN = 13 /* posix/ only: MSG_PREPARE of that launcher */,
       MSG_LOCATE = 14 /* answered by MSG_PID; a is 0 if the sandbox is gone */ };
/* Launcher to host, on a session's channel; MSG_USERNS_READY on the control socket: */
enum { MSG_GONE = 20, MSG_ALL_GONE = 21, MSG_USERNS_READY = 22, MSG_PID = 23,
       MSG_DRAINING = 24 /* confirms MSG_KILL_ALL; MSG_ALL_GONE follows when the last process has been reaped */,
       MSG_BEGUN = 25 /* posix/ only: confirms MSG_ATTACH and MSG_BEGIN; the host may close its copy of the socket */ };
/* Host to the sandbox's first process. MSG_SIGNAL goes to every process of the sandbox, or, if its id is not 0, only to
 * the process group of the command. MSG_FOLLOW: from now on the command ends with process a of the sandbox. */
enum { MSG_EXEC = 30, MSG_SIGNAL = 31, MSG_CONNECTED = 32 /* answers MSG_CONNECT: a is an errno, or 0 with a socket */,
       MSG_FOLLOW = 33 };
/* Host to the first process of a machine: the signal a goes to every process of the command with the label id. */
enum { MSG_TREE = 34 };
/* The sandbox to the host. MSG_TERMINAL carries the host's end of the command's terminal, and its device. MSG_MEMORY (posix/
 * only) precedes MSG_EXITED: the peak memory of the tree, and whether that exceeded the limit. */
enum { MSG_READY = 40, MSG_STARTED = 41, MSG_EXITED = 42, MSG_FAILED = 43, MSG_SHARED = 44, MSG_TERMINAL = 45,
       MSG_MEMORY = 46, MSG_CONNECT = 47,
       MSG_TREE_DONE = 48 /* answers MSG_TREE: a is the number of processes that are left, b is that of the request */,
       MSG_WAITING = 49 /* in a machine: process a, by its number inside, waits to become the command; the last one counts */ };

struct simple_msg { uint32_t type, id; int32_t a, b; };

enum { PREPARE_DENY_SETGROUPS = 1, PREPARE_NOTIFY = 2, PREPARE_MAP_IDS = 4, PREPARE_REPORT_PID = 8, PREPARE_WRAPPED = 16,
       PREPARE_COPY = 32 /* the last two descriptors are a user and a mount namespace to begin with */,
       PREPARE_JOIN = 64 /* with PREPARE_COPY: the last six are the namespaces of a machine, in the order of enum joined */,
       PREPARE_TEMPLATE = 1024 /* the last step starts a template, in the user namespace to begin with */,
       PREPARE_FORK = 2048 /* the sandbox is a fork of the template `template` of this channel */ };
enum joined { JOIN_USER = 0, JOIN_MOUNT = 1, JOIN_PID = 2, JOIN_IPC = 3, JOIN_UTS = 4, JOIN_CGROUP = 5, NJOINED = 6 };
/* The program enters a user namespace made for it, and has none of the caller's groups. */
enum { WRAP_USERNS = 1 };

struct prepare_msg {
    uint32_t type, id, clone_flags, flags;
    uint32_t uid_in, uid_out, gid_in, gid_out;
    uint32_t cgroups;
    uint32_t network; /* the number of steps, at the start, that set up a reusable network namespace */
    uint32_t processes, signals; /* limits for all sandboxes that begin with the same namespaces; 0: none */
    uint32_t template; /* the number of a template */
};

enum { EXEC_STDIN = 1, EXEC_STDOUT = 2, EXEC_STDERR = 4, EXEC_SCRIPT = 8, EXEC_PAYLOAD = 16, EXEC_WAIT = 32, EXEC_TTY = 64,
       EXEC_REPORT_START = 128 /* send MSG_STARTED */ };

/* The descriptors of a program that was started ahead of its command: one to wait on, and the slot to fill. */
enum { WAIT_FD = 100, SLOT_FD = 101 };

/* Followed, here or in the payload descriptor, by: rlimits (24 bytes each), cwd, programs to try, argv, env; the strings
 * are NUL-terminated. */
struct exec_msg { uint32_t type, flags, slot, rlimits, programs, argc, envc, size, rows, cols; };

struct exec_rlimit { uint32_t resource, zero; uint64_t soft, hard; };

/* A TCP connection that the command requests; the port is in host byte order, an IPv4 address has 4 bytes. */
struct connect_msg { uint32_t type, id, family, port; uint64_t address_start, address_end; };

struct exited_msg { uint32_t type; int32_t status; uint64_t user_us, system_us, maxrss_kib; };

/* request.c: the type of a message that the host sent; 0 when its type or size is invalid. */
uint32_t request_type(const void *bytes, size_t size);

/* The indices of a request's descriptors; -1 for absent ones. Both return -1 when the number of descriptors is not exactly
 * the one that the head announces. */
struct prepare_fds { int cgroups, first, count, copies; };
struct exec_fds { int stdio[3], script, payload, wait; };
int prepare_layout(const struct prepare_msg *p, int nfds, struct prepare_fds *out);
int exec_layout(const struct exec_msg *h, int nfds, int nslots, struct exec_fds *out);

/* Splits a request's body; `strings` has room for MAX_STRINGS. Returns -1 when the body does not match its head. */
struct exec_body {
    const struct exec_rlimit *rlimits;
    char *cwd, **programs, **argv, **envp;
};
int exec_decode(const struct exec_msg *h, char *body, size_t size, char **strings, struct exec_body *out);

/* Descriptors that the steps of a plan left open; `life` is a pipe that is closed when the launcher ends, or -1. `terminal`:
 * the host's end and the command's. `mediate` is the step with the calls that a runner performs; `notify`, their descriptor. */
struct built {
    int listeners[MAX_LISTENERS], nlisteners, slots[MAX_SLOTS], nslots, shared[NJOINED + 1], nshared, life;
    uint32_t label; /* of a command in a machine: the inode of its user namespace; 0 for every other */
    int terminal[2], has_terminal, notify;
    const struct step *mediate;
};

/* layers.c: mounts that are made apart from a private root. */
int make_layers(const struct step *step);
int attach_tree(int tree, const char *path);
int share_tree(struct built *built, const char *path);

/* sandbox.c: the life of a cloned child, from its first instruction; does not return. */
struct sandbox {
    int socket, plan, go[2], proc, nfds, nsteps, bwrap_stderr, program, life, launchers_end, pids;
    int template; /* the launcher's socket to the template: its end if it forks a sandbox, the template's own if it starts */
    int fds[MAX_FDS];
    const struct prepare_msg *prepare;
    struct step *steps;
};
_Noreturn void sandbox_main(struct sandbox *s);
int drop_groups(const struct prepare_msg *p);
int set_ids(const struct prepare_msg *p);
_Noreturn void sandbox_ready(int socket, const struct built *built, int life, int report);

/* wrap.c: another program (bwrap) builds the sandbox and starts us again as its first process; these do not return. */
int find_program(struct sandbox *s, const struct step *step);
_Noreturn void wrap(const struct sandbox *s, const struct step *step);
_Noreturn void inside_main(void);

/* steps.c */
extern int tree_fds[MAX_STEPS];
extern int caller_proc; /* the caller's /proc, for descriptors that are bound by their names there */
int open_source(const struct step *step, const int *fds, int nfds);
int open_sources(struct step *steps, int n, const int *fds, int nfds, int idmapped);
int perform_steps(struct step *steps, int from, int n, struct built *built, uint32_t *failed_op);

/* netlink.c: the number of acknowledgements in a reply, or -1 with the kernel's error. */
int netlink_acks(const char *reply, size_t size, int *error);
int netlink(int protocol, int acks, const char *bytes, size_t size);

/* copy.c: like make_child, from inside the namespaces. */
pid_t make_copy(struct sandbox *s, int channel, const int *namespaces, uint64_t oldest, uint32_t *failed_op);
int join_machine(const struct sandbox *s, uint32_t *label);

/* machine.c: the first process of a machine; does not return. */
_Noreturn void machine_main(int socket);

/* template.c: a Python that has started ahead, and of which sandboxes are forked. */
_Noreturn void start_template(const struct sandbox *s, const struct step *step);
struct forking { const struct sandbox *sandbox; int mounts, netns; };
pid_t fork_template(const struct forking *f, uint32_t *failed_op);
/* The descriptors that a template starts with, after its streams; and those of a request for a fork, after which come a
 * network namespace, if the plan says so, and those that the plan refers to. */
enum { TEMPLATE_LAUNCHER = 3, TEMPLATE_HOST = 4, TEMPLATE_PROC = 5, TEMPLATE_OUTPUT = 6, FORK_FDS = 6 };
/* The answer; `helper` is a process that the launcher has to reap. */
struct forked { uint32_t failed_op; int32_t pid, helper, error; };
int limit_all(const struct prepare_msg *p);

/* network.c */
int enter_network(const struct sandbox *s, int channel, int userns, uint64_t oldest, uint32_t *failed_op);
void use_network(pid_t user);
void leave_network(pid_t user, uint64_t youngest);
int forget_networks(int (*is_busy)(int channel));
void forget_networks_of(int channel);

/* runner.c: waits for the command, runs it, reports its end; does not return. */
_Noreturn void runner_main(int socket, const struct built *built);
/* Set in a fork of a template: the command does not exec, it continues in the memory of the template. Called in the process
 * of the command, which has its descriptors, limits and directory; does not return. */
extern void (*continue_template)(char **envp);
/* The parts of it for a runner that is not confined with its command. `confine` runs in the process of the command, and
 * returns the operation that failed, with errno, or 0. */
pid_t begin_command(int socket, const struct built *built, uint32_t (*confine)(void));
void await_exec(void);
_Noreturn void finish_command(int status, void (*end_all)(void));
void signal_command(const struct simple_msg *msg);

/* mediated.c: decodes the system calls of a command that its runner performs. Pure: no system call, so that it can be fuzzed;
 * all of its input is hostile. Each returns 0, or a negative errno. */
enum { MEDIATE_CONNECT = 1 /* the host makes connections; without it they are refused */ };
enum mediated_kind { MEDIATED_CONNECT = 1, MEDIATED_MODE = 2, MEDIATED_TIMES = 3, MEDIATED_KILL = 4, MEDIATED_THREAD = 5 };
enum times_format { TIMES_NOW = 0, TIMES_SECONDS = 1, TIMES_MICROSECONDS = 2, TIMES_NANOSECONDS = 3 };
struct mediated {
    enum mediated_kind kind;
    enum times_format format;
    int fd, follow;         /* a directory or socket of the caller; whether a link is followed */
    uint64_t path, data;    /* addresses in the caller's memory; 0 for none */
    size_t size;            /* of the data */
    uint32_t mode;
    int32_t pid, tid, signum;
};
enum { MEDIATED_DATA_SIZE = 128, UNIX_PATH_SIZE = 108 };
struct destination { int family; uint16_t port; unsigned char address[16]; char path[UNIX_PATH_SIZE + 1]; };
struct timespec;
int mediated_decode(int nr, const uint64_t *args, struct mediated *out);
int destination_decode(const unsigned char *bytes, size_t size, struct destination *out);
int times_decode(const unsigned char *bytes, size_t size, enum times_format format, struct timespec *out);
int is_below(const char *path, const char *roots, size_t size);

/* mediator.c: the runner of a command that is confined by Landlock instead of namespaces; does not return. */
_Noreturn void confined_main(int socket, struct built *built, int life, struct step *steps, int from, int n);

/* terminal.c */
int open_terminal(int *ends);
int send_terminal(int socket, const int *ahead, uint32_t rows, uint32_t cols);

/* proc.c */
int close_all_but(int *keep, int n);
int kill_children(int signum, int (*spare)(pid_t));
int list_children(pid_t *pids, int max);
int list_tree(pid_t *pids, int max);
int kill_only_child(pid_t pid);
int write_own_ids(int proc, const struct prepare_msg *p);
int write_ids(pid_t pid, const struct prepare_msg *p);
long make_child(uint32_t flags);
/* `failure_socket`: where a process that cannot continue reports its last failure; the control socket or the sandbox's. */
extern int failure_socket;
long make_owned_child(uint32_t flags, uid_t owner);
int make_userns(const struct prepare_msg *p);

/* message.c */
int send_message(int socket, const void *bytes, size_t size, const int *fds, int nfds);
ssize_t receive_message(int socket, void *bytes, size_t size, int *fds, int *nfds, int flags);
void report_failure(int socket, uint32_t op, int error);
void refuse(const int *fds, int nfds, int error);

#endif
