/* Functions of Linux, for tests of the portable launcher only; products use the Linux launcher.
 *
 * A label is the hard limit of a resource that nothing uses: inherited, and readable from outside, as on macOS. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "posix.h"

static uint64_t label_number(const char *label)
{
    uint64_t hash = 14695981039346656037ull; /* FNV-1a */
    for (; *label; label++)
        hash = (hash ^ (unsigned char)*label) * 1099511628211ull;
    return (1ull << 60) + (hash >> 5);
}

int os_cloexec_pipe(int ends[2]) { return pipe2(ends, O_CLOEXEC); }

int os_watch_host(pid_t host) { return (int)syscall(SYS_pidfd_open, host, 0U); }

int os_set_label(const char *label)
{
    uint64_t value = label_number(label);
    struct rlimit limit = {.rlim_cur = value, .rlim_max = value};
    return *label ? setrlimit(RLIMIT_RTTIME, &limit) : 0;
}

static int read_file(const char *path, char *text, size_t room)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t got = fd < 0 ? -1 : read(fd, text, room - 1);
    if (fd >= 0)
        close(fd);
    if (got < 0)
        return -1;
    text[got] = 0;
    return 0;
}

static int read_process(long pid, struct process *out)
{
    char path[64], text[1024], state;
    int ppid, group, session;
    snprintf(path, sizeof path, "/proc/%ld/stat", pid);
    char *after = read_file(path, text, sizeof text) < 0 ? NULL : strrchr(text, ')');
    if (!after || sscanf(after + 1, " %c %d %d %d", &state, &ppid, &group, &session) != 4 || state == 'Z' || state == 'X') // NOLINT(cert-err34-c)
        return 0;
    *out = (struct process){.pid = (pid_t)pid, .ppid = ppid, .sid = session, .label = -1};
    return 1;
}

/* With a label: only the processes that have it. */
size_t os_processes(struct process *out, size_t max, const char *label)
{
    size_t n = 0;
    uint64_t wanted = label_number(label);
    struct rlimit limit;
    DIR *proc = opendir("/proc");
    for (struct dirent *entry; proc && n < max && (entry = readdir(proc));) {
        long pid = strtol(entry->d_name, NULL, 10);
        if (pid <= 0 || pid == getpid())
            continue;
        if (*label && (prlimit((pid_t)pid, RLIMIT_RTTIME, NULL, &limit) < 0 || limit.rlim_max != wanted))
            continue;
        if (read_process(pid, &out[n]))
            out[n++].label = *label ? 1 : -1;
    }
    if (proc)
        closedir(proc);
    return n;
}

uint64_t os_memory(pid_t pid)
{
    char path[64], text[256];
    unsigned long long size, resident, shared;
    snprintf(path, sizeof path, "/proc/%d/statm", (int)pid);
    if (read_file(path, text, sizeof text) < 0 || sscanf(text, "%llu %llu %llu", &size, &resident, &shared) != 3) // NOLINT(cert-err34-c)
        return 0;
    return (resident - shared) * (uint64_t)sysconf(_SC_PAGESIZE);
}

uint64_t os_maxrss_kib(long maxrss) { return (uint64_t)maxrss; }

const char *os_own_path(void)
{
    static char path[4096];
    ssize_t n = readlink("/proc/self/exe", path, sizeof path - 1);
    return n > 0 ? path : NULL;
}
