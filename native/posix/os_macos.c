/* Functions of macOS. Tested on no Mac yet; scripts/check_mac.py tests them. */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <libproc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/event.h>
#include <sys/resource.h>
#include <unistd.h>

#include "posix.h"

/* Not in the public headers; the kernel's layout, unchanged since 10.9. `parent` does not change when the parent ends. */
enum { PIDUNIQIDENTIFIERINFO = 17 };
/* cppcheck-suppress unusedStructMember */
struct unique { uint8_t uuid[16]; uint64_t unique, parent; int32_t version, parent_version; uint64_t spare[2]; };

/* libsystem_sandbox: 0 allowed, 1 denied, -1 not known. */
typedef int check_fn(pid_t pid, const char *operation, int filter, ...);
enum { BY_GLOBAL_NAME = 2, NO_REPORT = 0x40000000 };

int os_cloexec_pipe(int ends[2])
{
    if (pipe(ends) < 0)
        return -1;
    fcntl(ends[0], F_SETFD, FD_CLOEXEC); /* one thread: nothing is started in between */
    fcntl(ends[1], F_SETFD, FD_CLOEXEC);
    return 0;
}

int os_watch_host(pid_t host)
{
    struct kevent change;
    int queue = kqueue();
    if (queue < 0)
        return -1;
    fcntl(queue, F_SETFD, FD_CLOEXEC);
    EV_SET(&change, host, EVFILT_PROC, EV_ADD, NOTE_EXIT, 0, NULL);
    if (kevent(queue, &change, 1, NULL, 0, NULL) < 0) {
        close(queue);
        return -1;
    }
    return queue;
}

int os_set_label(const char *label)
{
    (void)label;
    return 0; /* the profile carries it: it allows the look-up of a service of this name, which does not exist */
}

/* Only the run's own sandbox allows this name and refuses another. Without a sandbox both are allowed. */
static int has_label(pid_t pid, const char *label)
{
    static check_fn *check;
    static int is_resolved;
    char other[80];
    if (!is_resolved) {
        is_resolved = 1;
        check = (check_fn *)dlsym(RTLD_DEFAULT, "sandbox_check");
    }
    if (!check || !*label)
        return -1;
    snprintf(other, sizeof other, "%s.not", label);
    return check(pid, "mach-lookup", BY_GLOBAL_NAME | NO_REPORT, label) == 0 &&
           check(pid, "mach-lookup", BY_GLOBAL_NAME | NO_REPORT, other) == 1;
}

size_t os_processes(struct process *out, size_t max, const char *label)
{
    static pid_t pids[16384];
    size_t n = 0;
    int bytes = proc_listpids(PROC_UID_ONLY, geteuid(), pids, sizeof pids);
    for (int i = 0; i < bytes / (int)sizeof *pids && n < max; i++) {
        struct proc_bsdshortinfo info;
        struct unique ids = {.unique = 0};
        if (pids[i] <= 1 || pids[i] == getpid() ||
            proc_pidinfo(pids[i], PROC_PIDT_SHORTBSDINFO, 0, &info, sizeof info) != (int)sizeof info || info.pbsi_status == 5 /* SZOMB */)
            continue;
        int label_of = has_label(pids[i], label);
        if (label_of == 0)
            continue;
        proc_pidinfo(pids[i], PIDUNIQIDENTIFIERINFO, 0, &ids, sizeof ids);
        out[n++] = (struct process){.pid = pids[i], .ppid = (pid_t)info.pbsi_ppid, .sid = getsid(pids[i]), .unique = ids.unique,
                                    .parent = ids.parent, .label = (signed char)label_of};
    }
    return n;
}

uint64_t os_memory(pid_t pid)
{
    struct rusage_info_v2 used;
    return proc_pid_rusage(pid, RUSAGE_INFO_V2, (rusage_info_t *)&used) == 0 ? used.ri_phys_footprint : 0;
}

uint64_t os_maxrss_kib(long maxrss) { return (uint64_t)maxrss / 1024; } /* bytes there */

const char *os_own_path(void)
{
    static char path[PROC_PIDPATHINFO_MAXSIZE];
    return proc_pidpath(getpid(), path, sizeof path) > 0 ? path : NULL;
}
