/* Helpers for processes, id maps and descriptors. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <linux/securebits.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/fsuid.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "sbx.h"

/* Closes every descriptor from 3 up that is not in `keep` (which is sorted here). */
int close_all_but(int *keep, int n)
{
    for (int i = 1; i < n; i++)
        for (int k = i; k > 0 && keep[k - 1] > keep[k]; k--) {
            int swap = keep[k];
            keep[k] = keep[k - 1];
            keep[k - 1] = swap;
        }
    unsigned int from = 3;
    for (int i = 0; i < n; i++) {
        if ((unsigned int)keep[i] > from && syscall(SYS_close_range, from, (unsigned int)keep[i] - 1, 0) < 0)
            return -1;
        if ((unsigned int)keep[i] >= from)
            from = (unsigned int)keep[i] + 1;
    }
    return (int)syscall(SYS_close_range, from, ~0U, 0);
}

/* Reads the pids of a process's children, of all its threads, into `pids`. */
static int children_of(pid_t pid, pid_t *pids, int max)
{
    char path[64], text[8192];
    int count = 0;
    snprintf(path, sizeof path, "/proc/%d/task", (int)pid);
    DIR *tasks = opendir(path);
    if (!tasks)
        return 0;
    for (struct dirent *task; (task = readdir(tasks));) {
        long tid = strtol(task->d_name, NULL, 10);
        if (tid <= 0)
            continue;
        snprintf(path, sizeof path, "/proc/%d/task/%ld/children", (int)pid, tid);
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        if (fd < 0)
            continue;
        ssize_t got = read(fd, text, sizeof text - 1);
        close(fd);
        text[got > 0 ? got : 0] = 0;
        for (char *at = text, *end; count < max; at = end) {
            long child = strtol(at, &end, 10);
            if (end == at)
                break;
            if (child > 1)
                pids[count++] = (pid_t)child;
        }
    }
    closedir(tasks);
    return count;
}

/* The pids of our own children. */
int list_children(pid_t *pids, int max)
{
    return children_of(getpid(), pids, max);
}

/* All descendants of ours, each before its own children; at most `max`. */
int list_tree(pid_t *pids, int max)
{
    int count = children_of(getpid(), pids, max);
    for (int i = 0; i < count; i++)
        count += children_of(pids[i], pids + count, max - count);
    return count;
}

/* Signals every child that `spare` does not exempt, and all descendants. Returns the number of children. For processes
 * outside a pid namespace of their own, where kill(-1) would reach the whole machine. */
int kill_children(int signum, int (*spare)(pid_t))
{
    static pid_t waiting[4096];
    int count = 0, n = children_of(getpid(), waiting, 512);
    for (int i = 0; i < n;)
        if (spare && spare(waiting[i]))
            waiting[i] = waiting[--n];
        else
            i++;
    count = n;
    while (n > 0) {
        pid_t pid = waiting[--n];
        n += children_of(pid, waiting + n, (int)(sizeof waiting / sizeof *waiting) - n);
        kill(pid, signum);
    }
    return count;
}

/* Kills the only child of a child of ours. Returns 0 when there is none, or more than one. The pid could have been reused
 * between reading and opening it; it was not if it is still listed afterwards. */
int kill_only_child(pid_t pid)
{
    pid_t child[2], again[2];
    if (children_of(pid, child, 2) != 1)
        return 0;
    SCOPED_FD fd = (int)syscall(SYS_pidfd_open, child[0], 0U);
    if (fd < 0)
        return 0;
    int sure = children_of(pid, again, 2) == 1 && again[0] == child[0];
    if (sure)
        syscall(SYS_pidfd_send_signal, fd, SIGKILL, NULL, 0U);
    return sure;
}

static int write_file(pid_t pid, const char *name, const char *text)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/%s", (int)pid, name);
    SCOPED_FD fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        return -1;
    ssize_t wrote = write(fd, text, strlen(text));
    return wrote == (ssize_t)strlen(text) ? 0 : -1;
}

int write_ids(pid_t pid, const struct prepare_msg *p)
{
    char text[64];
    if ((p->flags & PREPARE_DENY_SETGROUPS) && write_file(pid, "setgroups", "deny") < 0)
        return -1;
    snprintf(text, sizeof text, "%u %u 1\n", p->gid_in, p->gid_out);
    if (write_file(pid, "gid_map", text) < 0)
        return -1;
    snprintf(text, sizeof text, "%u %u 1\n", p->uid_in, p->uid_out);
    return write_file(pid, "uid_map", text);
}

/* For a process in a user namespace that its own id created: the id is the same inside. */
int write_own_ids(int proc, const struct prepare_msg *p)
{
    char uid[64], gid[64];
    const struct { const char *name, *text; } files[] = {{"self/setgroups", "deny"}, {"self/gid_map", gid}, {"self/uid_map", uid}};
    snprintf(gid, sizeof gid, "%u %u 1\n", p->gid_in, p->gid_out);
    snprintf(uid, sizeof uid, "%u %u 1\n", p->uid_in, p->uid_out);
    for (int i = 0; i < 3; i++) {
        SCOPED_FD fd = openat(proc, files[i].name, O_WRONLY | O_CLOEXEC);
        if (fd < 0 || write(fd, files[i].text, strlen(files[i].text)) < 0)
            return -1;
    }
    return 0;
}

/* With CLONE_PARENT the kernel sends the exit signal of this process instead of SIGCHLD. */
long make_child(uint32_t flags)
{
    /* Not clone3: the filters of container engines refuse it with ENOSYS because they cannot inspect its arguments. */
    return syscall(SYS_clone, (unsigned long)flags | SIGCHLD, 0UL, 0UL, 0UL, 0UL);
}

/* A process that does not own a user namespace needs these capabilities above it, to write its id maps and to open it. */
static int may_map_others(void)
{
    const uint32_t needed = 1U << CAP_SYS_ADMIN | 1U << CAP_DAC_OVERRIDE | 1U << CAP_SYS_PTRACE;
    struct __user_cap_header_struct head = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct held[2];
    return syscall(SYS_capget, &head, held) == 0 && (held[0].effective & needed) == needed;
}

int failure_socket = -1;

/* The process has ids or securebits that are not its own, and must not continue with them. */
static _Noreturn void end_process(void)
{
    report_failure(failure_socket, OP_PROCESS, errno);
    _exit(EXIT_LAUNCHER);
}

/* Like make_child, in a user namespace that `owner` owns. The kernel also charges processes, queued signals, inotify
 * instances and more to the owner of a user namespace: where a sandbox has an id of its own, none of them may be charged
 * to the caller. Files are still opened as the caller, and its capabilities are kept, so that restrictions on unprivileged
 * user namespaces do not apply. */
long make_owned_child(uint32_t flags, uid_t owner)
{
    uid_t caller = geteuid();
    if (!(flags & CLONE_NEWUSER) || owner == caller || !may_map_others())
        return make_child(flags);
    int bits = prctl(PR_GET_SECUREBITS, 0, 0, 0, 0);
    if (bits < 0)
        return -1;
    int kept = prctl(PR_SET_SECUREBITS, (unsigned long)bits | SECBIT_NO_SETUID_FIXUP, 0, 0, 0) == 0;
    if (!kept && errno != EPERM) /* without CAP_SETPCAP the capabilities come back with the id */
        return -1;
    long pid = -1;
    int error;
    if (setresuid((uid_t)-1, owner, (uid_t)-1) < 0) {
        error = errno;
    } else {
        setfsuid(caller);
        errno = EPERM; /* setfsuid() reports no error of its own */
        /* A change of ids makes this memory, and every copy of it, undumpable. */
        if ((uid_t)setfsuid((uid_t)-1) == caller) {
            pid = prctl(PR_SET_DUMPABLE, 1, 0, 0, 0) < 0 ? -1 : make_child(flags);
            if (pid == 0)
                return 0;
        }
        error = errno;
        if (setresuid((uid_t)-1, caller, (uid_t)-1) < 0)
            end_process();
        prctl(PR_SET_DUMPABLE, 1, 0, 0, 0);
    }
    if (kept && prctl(PR_SET_SECUREBITS, (unsigned long)bits, 0, 0, 0) < 0)
        end_process();
    errno = error;
    return pid;
}

/* Returns a descriptor of a new user namespace; the process that it was made for ends at once. */
int make_userns(const struct prepare_msg *p)
{
    int hold[2], fd = -1, error = 0;
    char byte;
    if (pipe2(hold, O_CLOEXEC) < 0)
        return -1;
    pid_t pid = (pid_t)make_owned_child(CLONE_NEWUSER, p->uid_out);
    if (pid == 0) {
        close(hold[1]);
        _exit(read(hold[0], &byte, 1) < 0);
    }
    if (pid > 0 && write_ids(pid, p) == 0) {
        char path[64];
        snprintf(path, sizeof path, "/proc/%d/ns/user", (int)pid);
        fd = open(path, O_RDONLY | O_CLOEXEC);
    }
    error = errno;
    close(hold[0]);
    close(hold[1]);
    if (pid > 0) {
        kill(pid, SIGKILL); /* it ends by itself, unless it has been stopped */
        waitpid(pid, NULL, 0);
    }
    errno = error;
    return fd;
}
