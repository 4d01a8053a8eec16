/* Decodes system calls that a confined command makes and its runner performs. Pure: no system call, no allocation.
 *
 * The numbers come from the kernel; the bytes come from the memory of the command and may hold anything. Each piece of
 * memory is read once and decoded here; the decoded copy is what is judged and what is used. */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <time.h>

#include "sbx.h"

#ifndef SYS_fchmodat2
#define SYS_fchmodat2 452
#endif
_Static_assert(UNIX_PATH_SIZE == sizeof((struct sockaddr_un *)0)->sun_path, "the kernel's own bound");
_Static_assert(sizeof(struct sockaddr_in6) <= MEDIATED_DATA_SIZE && 4 * sizeof(int64_t) <= MEDIATED_DATA_SIZE, "all data fits");

enum { SET_IDS = 06000, RFC2133_SIZE = 24 /* the smallest sockaddr_in6 that the kernel accepts */ };

static int mode(struct mediated *out, int fd, uint64_t path, uint64_t value, uint64_t flags)
{
    if (flags & ~(uint64_t)(AT_SYMLINK_NOFOLLOW | AT_EMPTY_PATH))
        return -EINVAL;
    if (value & SET_IDS)
        return -EPERM;
    *out = (struct mediated){.kind = MEDIATED_MODE, .fd = fd, .path = path, .mode = (uint32_t)value & 07777,
                             .follow = !(flags & AT_SYMLINK_NOFOLLOW)};
    return 0;
}

static int times(struct mediated *out, int fd, uint64_t path, uint64_t data, enum times_format format, uint64_t flags)
{
    if (flags & ~(uint64_t)(AT_SYMLINK_NOFOLLOW | AT_EMPTY_PATH))
        return -EINVAL;
    *out = (struct mediated){.kind = MEDIATED_TIMES, .fd = fd, .path = path, .data = data,
                             .format = data ? format : TIMES_NOW, .follow = !(flags & AT_SYMLINK_NOFOLLOW),
                             .size = (format == TIMES_SECONDS ? 2 : 4) * sizeof(int64_t)};
    return 0;
}

int mediated_decode(int nr, const uint64_t *a, struct mediated *out)
{
    int fd = (int)a[0];
    switch (nr) {
    case SYS_connect:
        if (a[2] < sizeof(sa_family_t) || a[2] > MEDIATED_DATA_SIZE)
            return -EINVAL;
        *out = (struct mediated){.kind = MEDIATED_CONNECT, .fd = fd, .data = a[1], .size = (size_t)a[2]};
        return 0;
    case SYS_fchmod: return mode(out, fd, 0, a[1], 0);
    case SYS_fchmodat: return a[1] ? mode(out, fd, a[1], a[2], 0) : -EFAULT;
    case SYS_fchmodat2: return a[1] ? mode(out, fd, a[1], a[2], a[3]) : -EFAULT;
    case SYS_utimensat: return times(out, fd, a[1], a[2], TIMES_NANOSECONDS, a[3]);
#ifdef SYS_chmod
    case SYS_chmod: return a[0] ? mode(out, AT_FDCWD, a[0], a[1], 0) : -EFAULT;
    case SYS_utime: return a[0] ? times(out, AT_FDCWD, a[0], a[1], TIMES_SECONDS, 0) : -EFAULT;
    case SYS_utimes: return a[0] ? times(out, AT_FDCWD, a[0], a[1], TIMES_MICROSECONDS, 0) : -EFAULT;
    case SYS_futimesat: return times(out, fd, a[1], a[2], TIMES_MICROSECONDS, 0);
#endif
    case SYS_kill: *out = (struct mediated){.kind = MEDIATED_KILL, .pid = (int32_t)a[0], .signum = (int32_t)a[1]}; return 0;
    case SYS_tkill: *out = (struct mediated){.kind = MEDIATED_THREAD, .tid = (int32_t)a[0], .signum = (int32_t)a[1]}; return 0;
    case SYS_tgkill:
        *out = (struct mediated){.kind = MEDIATED_THREAD, .pid = (int32_t)a[0], .tid = (int32_t)a[1], .signum = (int32_t)a[2]};
        return 0;
    default: return -EPERM;
    }
}

int destination_decode(const unsigned char *bytes, size_t size, struct destination *out)
{
    sa_family_t family;
    struct sockaddr_in in;
    struct sockaddr_in6 in6 = {0};
    memset(out, 0, sizeof *out);
    if (size < sizeof family)
        return -EINVAL;
    memcpy(&family, bytes, sizeof family);
    out->family = family;
    switch (family) {
    case AF_INET:
        if (size < sizeof in)
            return -EINVAL;
        memcpy(&in, bytes, sizeof in);
        out->port = ntohs(in.sin_port);
        memcpy(out->address, &in.sin_addr, sizeof in.sin_addr);
        return 0;
    case AF_INET6:
        if (size < RFC2133_SIZE)
            return -EINVAL;
        memcpy(&in6, bytes, size < sizeof in6 ? size : sizeof in6);
        out->port = ntohs(in6.sin6_port);
        memcpy(out->address, &in6.sin6_addr, sizeof out->address);
        return 0;
    case AF_UNIX:
        size -= sizeof family;
        if (size > UNIX_PATH_SIZE)
            return -EINVAL;
        if (size == 0 || bytes[sizeof family] == 0)
            return -EACCES; /* an abstract name has no file whose place could be judged */
        memcpy(out->path, bytes + sizeof family, size);
        return 0;
    default: return -EAFNOSUPPORT;
    }
}

int times_decode(const unsigned char *bytes, size_t size, enum times_format format, struct timespec *out)
{
    int64_t raw[4] = {0};
    if (size > sizeof raw || (format != TIMES_NOW && size < 2 * sizeof *raw))
        return -EINVAL;
    memcpy(raw, bytes, size);
    for (size_t i = 0; i < 2; i++)
        switch (format) {
        case TIMES_NOW: out[i] = (struct timespec){.tv_nsec = UTIME_NOW}; break;
        case TIMES_SECONDS: out[i] = (struct timespec){.tv_sec = raw[i]}; break;
        case TIMES_NANOSECONDS: out[i] = (struct timespec){.tv_sec = raw[2 * i], .tv_nsec = raw[2 * i + 1]}; break;
        case TIMES_MICROSECONDS:
            if (raw[2 * i + 1] < 0 || raw[2 * i + 1] >= 1000000)
                return -EINVAL;
            out[i] = (struct timespec){.tv_sec = raw[2 * i], .tv_nsec = raw[2 * i + 1] * 1000};
        }
    return 0;
}

/* Whether a path is one of the roots, which each end in a NUL, or lies below one. */
int is_below(const char *path, const char *roots, size_t size)
{
    for (size_t at = 0; at < size;) {
        const char *end = memchr(roots + at, 0, size - at);
        if (!end)
            return 0;
        size_t n = (size_t)(end - (roots + at));
        if (n > 0 && strncmp(path, roots + at, n) == 0 && (path[n] == '/' || !path[n]))
            return 1;
        at += n + 1;
    }
    return 0;
}
