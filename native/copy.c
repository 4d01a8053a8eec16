/* A sandbox that begins with a copy of mounts that were built once (OP_SHARE), which is far cheaper than building them again.
 *
 * A short-lived helper enters the namespaces that hold the mounts and makes the sandbox's first process from there, as a
 * child of the launcher. That process has namespaces of its own, its user namespace inside the shared one: it gets a copy
 * of the shared mounts that it can neither change nor take apart. */
#include <errno.h>
#include <grp.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "sbx.h"

struct entering {
    struct sandbox *sandbox;
    int channel, userns, mounts;
    uint64_t oldest;
    /* Written by the helper, which shares our memory. */
    uint32_t failed_op;
    volatile pid_t pid;
    volatile int error;
};

/* The kernel stores a limit when a user namespace is made, and enforces it on everything below its parent. */
static int limit_all(const struct prepare_msg *p)
{
    const struct rlimit processes = {p->processes, p->processes}, signals = {p->signals, p->signals};
    return (p->processes && setrlimit(RLIMIT_NPROC, &processes) < 0) || (p->signals && setrlimit(RLIMIT_SIGPENDING, &signals) < 0)
               ? -1
               : 0;
}

/* Runs in the memory of the launcher and with its descriptors. The launcher is suspended until this ends: system calls only. */
static int enter(void *arg)
{
    struct entering *e = arg;
    const struct prepare_msg *p = e->sandbox->prepare;
    /* Groups are dropped first: a user namespace may forbid setgroups inside. */
    if (drop_groups(p) == 0 && setns(e->userns, CLONE_NEWUSER) == 0 && setns(e->mounts, CLONE_NEWNS) == 0 &&
        (!p->network || enter_network(e->sandbox, e->channel, e->userns, e->oldest, &e->failed_op) >= -1) &&
        limit_all(p) == 0 && set_ids(p) == 0) {
        /* A change of ids makes this memory, which is the launcher's, and every copy of it undumpable. */
        prctl(PR_SET_DUMPABLE, 1, 0, 0, 0);
        e->pid = (pid_t)make_child(p->clone_flags | CLONE_PARENT);
        if (e->pid == 0)
            sandbox_main(e->sandbox);
    }
    e->error = errno;
    _exit(0);
}

pid_t make_copy(struct sandbox *s, int channel, int userns, int mounts, uint64_t oldest, uint32_t *failed_op)
{
    static char stack[65536] __attribute__((aligned(16)));
    /* ECHILD remains if the helper is killed before it can report an error. */
    struct entering e = {.sandbox = s, .channel = channel, .userns = userns, .mounts = mounts, .oldest = oldest,
                         .failed_op = OP_COPY, .pid = -1, .error = ECHILD};
    pid_t helper = clone(enter, stack + sizeof stack, CLONE_VM | CLONE_FILES | CLONE_VFORK | SIGCHLD, &e);
    if (helper < 0)
        return -1;
    waitpid(helper, NULL, 0);
    use_network(e.pid);
    *failed_op = e.failed_op;
    errno = e.error;
    return e.pid;
}
