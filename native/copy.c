/* A sandbox that begins with a copy of mounts that were built once (OP_SHARE), which is far cheaper than building them again.
 *
 * A short-lived helper enters the namespaces that hold the mounts and makes the sandbox's first process from there, as a
 * child of the launcher. That process has namespaces of its own, its user namespace inside the shared one: it gets a copy
 * of the shared mounts that it can neither change nor take apart.
 *
 * In a machine the helper enters the machine's namespaces instead. The process that it makes is the runner of one command:
 * it stays outside the machine's pid namespace, so no process in there can signal it, and only the command is forked into
 * it. A command has a user namespace of its own below the machine's: processes of different commands have the same id, but
 * no rights over each other's memory and descriptors; and whatever a command starts can be found by that namespace. */
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "sbx.h"

struct entering {
    struct sandbox *sandbox;
    int channel, netns;
    const int *namespaces;
    uint64_t oldest;
    /* Written by the helper, which shares our memory. */
    uint32_t failed_op;
    volatile pid_t pid;
    volatile int error;
};

/* The kernel stores a limit when a user namespace is made, and enforces it on everything below its parent. */
int limit_all(const struct prepare_msg *p)
{
    const struct rlimit processes = {p->processes, p->processes}, signals = {p->signals, p->signals};
    return (p->processes && setrlimit(RLIMIT_NPROC, &processes) < 0) || (p->signals && setrlimit(RLIMIT_SIGPENDING, &signals) < 0)
               ? -1
               : 0;
}

/* The kernel refuses to enter a user namespace again; mounts that root has made belong to its own. */
static int enter_user(int namespace, int proc)
{
    struct stat wanted, own;
    if (setns(namespace, CLONE_NEWUSER) == 0)
        return 0;
    if (errno != EINVAL || fstat(namespace, &wanted) < 0 || fstatat(proc, "self/ns/user", &own, 0) < 0)
        return -1;
    errno = EINVAL;
    return wanted.st_dev == own.st_dev && wanted.st_ino == own.st_ino ? 0 : -1;
}

static int enter_namespaces(const int *namespaces, int proc, int joins)
{
    if (enter_user(namespaces[JOIN_USER], proc) < 0 || setns(namespaces[JOIN_MOUNT], CLONE_NEWNS) < 0)
        return -1;
    return joins && (setns(namespaces[JOIN_IPC], CLONE_NEWIPC) < 0 || setns(namespaces[JOIN_UTS], CLONE_NEWUTS) < 0 ||
                     setns(namespaces[JOIN_CGROUP], CLONE_NEWCGROUP) < 0)
               ? -1
               : 0;
}

/* Like `enter`, but only for the network namespace of a sandbox that a template forks: opens it for the template. */
static int enter_network_only(void *arg)
{
    struct entering *e = arg;
    if (enter_namespaces(e->namespaces, e->sandbox->proc, 0) == 0 &&
        enter_network(e->sandbox, e->channel, e->namespaces[JOIN_USER], e->oldest, &e->failed_op) >= -1)
        e->netns = openat(e->sandbox->proc, "self/ns/net", O_RDONLY | O_CLOEXEC);
    e->error = errno;
    _exit(0);
}

/* Runs in the memory of the launcher and with its descriptors. The launcher is suspended until this ends: system calls only. */
static int enter(void *arg)
{
    struct entering *e = arg;
    const struct prepare_msg *p = e->sandbox->prepare;
    int joins = (p->flags & PREPARE_JOIN) != 0;
    /* Groups are dropped first: a user namespace may forbid setgroups inside. */
    if (drop_groups(p) == 0 && enter_namespaces(e->namespaces, e->sandbox->proc, joins) == 0 &&
        (!p->network || enter_network(e->sandbox, e->channel, e->namespaces[JOIN_USER], e->oldest, &e->failed_op) >= -1) &&
        limit_all(p) == 0 && (joins || set_ids(p) == 0)) {
        /* A change of ids makes this memory, which is the launcher's, and every copy of it undumpable. */
        prctl(PR_SET_DUMPABLE, 1, 0, 0, 0);
        e->pid = (pid_t)make_child((joins ? 0 : p->clone_flags) | CLONE_PARENT);
        if (e->pid == 0)
            sandbox_main(e->sandbox);
    }
    e->error = errno;
    _exit(0);
}

/* The runner of a command, with all capabilities in the machine's user namespace: gets its own namespaces. Its children,
 * but not the runner itself, will be in the pid namespace. */
int join_machine(const struct sandbox *s, uint32_t *label)
{
    struct stat st;
    if (setns(s->pids, CLONE_NEWPID) < 0 || set_ids(s->prepare) < 0 || prctl(PR_SET_DUMPABLE, 1, 0, 0, 0) < 0 ||
        unshare((int)s->prepare->clone_flags) < 0 || fstatat(s->proc, "self/ns/user", &st, 0) < 0)
        return -1;
    *label = (uint32_t)st.st_ino;
    return 0;
}

pid_t make_copy(struct sandbox *s, int channel, const int *namespaces, uint64_t oldest, uint32_t *failed_op)
{
    /* ECHILD remains if the helper is killed before it can report an error. */
    struct entering e = {.sandbox = s, .channel = channel, .namespaces = namespaces, .netns = -1, .oldest = oldest,
                         .failed_op = OP_COPY, .pid = -1, .error = ECHILD};
    int forks = (s->prepare->flags & PREPARE_FORK) != 0;
    if (!forks || s->prepare->network) {
        static char stack[65536] __attribute__((aligned(16)));
        pid_t helper = clone(forks ? enter_network_only : enter, stack + sizeof stack,
                             CLONE_VM | CLONE_FILES | CLONE_VFORK | SIGCHLD, &e);
        if (helper < 0)
            return -1;
        waitpid(helper, NULL, 0);
    }
    if (forks) {
        SCOPED_FD netns = e.netns;
        const struct forking f = {.sandbox = s, .mounts = namespaces[JOIN_MOUNT], .netns = netns};
        if (netns >= 0 || !s->prepare->network) {
            e.failed_op = OP_FORK;
            e.pid = fork_template(&f, &e.failed_op);
            e.error = errno;
        }
    }
    use_network(e.pid);
    *failed_op = e.failed_op;
    errno = e.error;
    return e.pid;
}
