/* A sandbox that bwrap builds: this process becomes bwrap, and bwrap executes the launcher again inside, which performs the
 * rest of the plan.
 *
 * The descriptors that bwrap inherits have fixed numbers, its command line is always the same, and its environment is
 * empty: everything that differs between sandboxes is in memory files that only bwrap and the inner process read.
 *
 * bwrap has no parent-death signal. If it died during the set-up, it would leave a child that waits for it for ever, and
 * later its own death signal would not reach a child with another id. Instead bwrap finishes, and the process that it
 * starts sees that the launcher's life pipe is closed: that process ends, and bwrap after it. */
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "sbx.h"

enum { ARGS_FD = 3, PLAN_FD = 4, SOCKET_FD = 5, SELF_FD = 6, USERNS_FD = 7, PROGRAM_FD = 8, LIFE_FD = 9, FIRST_FREE = 10, ABOVE = 64 };

static _Noreturn void fail(int socket, uint32_t op, int error)
{
    report_failure(socket, op, error);
    _exit(EXIT_SANDBOX);
}

static int memory_file(const char *bytes, size_t size)
{
    int fd = memfd_create("plan", MFD_CLOEXEC);
    while (fd >= 0 && size > 0) {
        ssize_t wrote = write(fd, bytes, size);
        if (wrote < 0)
            return -1;
        bytes += wrote;
        size -= (size_t)wrote;
    }
    return fd >= 0 && lseek(fd, 0, SEEK_SET) == 0 ? fd : -1;
}

/* Opened with the caller's ids and root: later the program may be hidden or out of reach. */
int find_program(struct sandbox *s, const struct step *step)
{
    if (!memchr(step->data[0], 0, step->len[0])) {
        errno = EINVAL;
        return -1;
    }
    return s->program = open(step->data[0], O_PATH | O_CLOEXEC);
}

_Noreturn void wrap(const struct sandbox *s, const struct step *step)
{
    size_t used = strlen(step->data[0]) + 1;
    int socket = s->socket, userns = (step->a[0] & WRAP_USERNS) != 0;
    struct prepare_msg ids = {.uid_in = (uint32_t)(step->a[1] >> 32), .uid_out = (uint32_t)step->a[1],
                              .gid_in = (uint32_t)(step->a[2] >> 32), .gid_out = (uint32_t)step->a[2]};
    int from[FIRST_FREE] = {[SOCKET_FD] = socket, [USERNS_FD] = -1, [PROGRAM_FD] = s->program, [LIFE_FD] = s->life};
    if ((from[ARGS_FD] = memory_file(step->data[0] + used, step->len[0] - used)) < 0 ||
        (from[PLAN_FD] = memory_file(step->data[1], step->len[1])) < 0 ||
        (from[SELF_FD] = open("/proc/self/exe", O_PATH | O_CLOEXEC)) < 0)
        fail(socket, OP_FDS, errno);
    if (userns && ((from[USERNS_FD] = make_userns(&ids)) < 0 || setgroups(0, NULL) < 0))
        fail(socket, OP_IDS, errno);
    /* First move all of them up, so that none is overwritten before its turn. */
    for (int fd = ARGS_FD; fd < FIRST_FREE; fd++)
        if ((fd != USERNS_FD || userns) && (from[fd] = fcntl(from[fd], F_DUPFD_CLOEXEC, ABOVE)) < 0)
            fail(socket, OP_FDS, errno);
    int bwrap_stderr = fcntl(s->bwrap_stderr, F_DUPFD_CLOEXEC, ABOVE);
    if (bwrap_stderr < 0 || dup2(bwrap_stderr, STDERR_FILENO) < 0)
        fail(socket, OP_FDS, errno);
    socket = from[SOCKET_FD];
    for (int fd = ARGS_FD; fd < FIRST_FREE; fd++)
        if (from[fd] >= 0 && dup2(from[fd], fd) < 0)
            fail(socket, OP_FDS, errno);
    if (!userns)
        close(USERNS_FD);
    if (syscall(SYS_close_range, FIRST_FREE, ~0U, 0) < 0)
        fail(SOCKET_FD, OP_FDS, errno);
    char *const argv[] = {"bwrap", "--args", "3", "--", "/proc/self/fd/6", "inside", NULL};
    char *const envp[] = {NULL};
    syscall(SYS_execveat, PROGRAM_FD, "", argv, envp, AT_EMPTY_PATH);
    fail(SOCKET_FD, OP_WRAP, errno);
}

_Noreturn void inside_main(void)
{
    static struct step steps[MAX_STEPS];
    static struct built built;
    struct stat st;
    uint32_t failed_op = 0;
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    prctl(PR_SET_NAME, "sandbox", 0, 0, 0);
    if (setsid() < 0)
        fail(SOCKET_FD, OP_PROCESS, errno);
    umask(022);
    if (dup2(STDIN_FILENO, STDERR_FILENO) < 0 || fstat(PLAN_FD, &st) < 0)
        fail(SOCKET_FD, OP_FDS, errno);
    const unsigned char *plan = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, PLAN_FD, 0);
    if (plan == MAP_FAILED)
        fail(SOCKET_FD, OP_PLAN, errno);
    int nsteps = plan_decode(plan, (size_t)st.st_size, steps, MAX_STEPS);
    if (nsteps < 0)
        fail(SOCKET_FD, OP_PLAN, EINVAL);
    built.life = LIFE_FD;
    if (open_sources(steps, nsteps, NULL, 0, 0) < 0)
        fail(SOCKET_FD, OP_BIND | 0xffffU << 8, errno);
    if (perform_steps(steps, 0, nsteps, &built, &failed_op) < 0)
        fail(SOCKET_FD, failed_op, errno);
    sandbox_ready(SOCKET_FD, &built, LIFE_FD, 1);
}
