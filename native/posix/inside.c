/* The process that becomes the command. If the backend has a sandbox, this process is inside it already. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <termios.h>
#include <unistd.h>

#include "posix.h"

static union { _Alignas(struct exec_rlimit) char bytes[MAX_MESSAGE]; struct exec_msg exec; } request;
static char *strings[MAX_STRINGS];
static int status_fd;

static _Noreturn void fail(uint32_t op, int error)
{
    struct progress p = {.op = op, .error = error};
    (void)!write(status_fd, &p, sizeof p);
    _exit(EXIT_NOT_EXECUTED);
}

static void write_progress(uint32_t at)
{
    struct progress p = {.op = at};
    if (write(status_fd, &p, sizeof p) != (ssize_t)sizeof p)
        _exit(EXIT_NOT_EXECUTED); /* the launcher has ended */
}

/* A large request is in a file of its own. */
static char *read_payload(int fd, size_t size)
{
    struct stat st;
    if (fstat(fd, &st) < 0)
        return NULL;
    if (st.st_size < 0 || (size_t)st.st_size != size) {
        errno = EPROTO;
        return NULL;
    }
    char *body = malloc(size);
    for (size_t have = 0; body && have < size;) {
        ssize_t got = pread(fd, body + have, size - have, (off_t)have);
        if (got <= 0)
            return errno = got ? errno : EPROTO, NULL;
        have += (size_t)got;
    }
    return body;
}

static void set_streams(const int *stdio, const int *fds, int terminal)
{
    for (int i = 0; i < 3; i++) {
        int fd = stdio[i] >= 0 ? fds[stdio[i]] : open("/dev/null", i ? O_WRONLY : O_RDONLY);
        if (fd < 0)
            fail(OP_STDIO, errno);
        if (fd < 3) { /* the next streams must not overwrite it */
            fd = fcntl(fd, F_DUPFD, 64);
            if (fd < 0)
                fail(OP_STDIO, errno);
        }
        if (dup2(fd, i) < 0)
            fail(OP_STDIO, errno);
        fcntl(fd, F_SETFD, FD_CLOEXEC);
    }
    if (terminal && ioctl(0, TIOCSCTTY, 0) < 0)
        fail(OP_TTY, errno);
}

_Noreturn void inside(int socket, int status, int report_ready)
{
    int fds[MAX_FDS], nfds;
    struct exec_fds places;
    struct exec_body body;
    struct simple_msg ready = {.type = MSG_READY};
    status_fd = status;
    fcntl(socket, F_SETFD, FD_CLOEXEC);
    fcntl(status, F_SETFD, FD_CLOEXEC);
    if (report_ready && frame_send(socket, &ready, sizeof ready, 0) < 0)
        _exit(EXIT_SANDBOX);
    ssize_t got = frame_wait(socket, request.bytes, sizeof request, fds, &nfds);
    if (got == 0) {
        write_progress(AT_UNUSED);
        _exit(EXIT_SANDBOX);
    }
    if (got < 0)
        fail(OP_REQUEST, errno);
    const struct exec_msg *h = &request.exec;
    if (request_type(request.bytes, (size_t)got) != MSG_EXEC || exec_layout(h, nfds, 0, &places) < 0)
        fail(OP_REQUEST, EPROTO);
    char *bytes = request.bytes + sizeof *h;
    size_t size = (size_t)got - sizeof *h;
    if (places.payload >= 0) {
        size = h->size;
        if (!(bytes = read_payload(fds[places.payload], size)))
            fail(OP_REQUEST, errno);
    }
    if (exec_decode(h, bytes, size, strings, &body) < 0)
        fail(OP_REQUEST, EPROTO);
    set_streams(places.stdio, fds, (h->flags & EXEC_TTY) != 0);
    for (uint32_t i = 0; i < h->rlimits; i++) {
        struct rlimit limit = {.rlim_cur = (rlim_t)body.rlimits[i].soft, .rlim_max = (rlim_t)body.rlimits[i].hard};
        if (setrlimit((int)body.rlimits[i].resource, &limit) < 0)
            fail(OP_RLIMIT, errno);
    }
    if (chdir(body.cwd) < 0)
        fail(OP_CHDIR, errno);
    write_progress(h->flags & EXEC_REPORT_START ? AT_EXEC_REPORT : AT_EXEC);
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    int denied = 0;
    for (char **program = body.programs; *program; program++) {
        execve(*program, body.argv, body.envp);
        if (errno == EACCES)
            denied = 1;
        else if (errno != ENOENT && errno != ENOTDIR)
            fail(OP_EXEC, errno);
    }
    fail(OP_EXEC, denied ? EACCES : errno);
}
