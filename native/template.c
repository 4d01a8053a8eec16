/* The launcher's side of a template: a Python that has started and imported modules ahead, and of which sandboxes are forked.
 *
 * A template executes only code that the owner trusts. It has the ids of the sandboxes and lives in the user namespace that
 * they share, in a copy of their mounts, where everything that sandboxed code can write is covered. It keeps two
 * capabilities there, which its forks need to enter the mounts and the network of a sandbox. template/serve.c is its own
 * side. */
#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "sbx.h"

enum { FORK_WAIT_MS = 2000, MAX_ARGUMENTS = 16, ABOVE = 64 };

static const unsigned kept_capabilities[] = {CAP_SYS_ADMIN, CAP_SYS_CHROOT};

static _Noreturn void fail(int socket)
{
    report_failure(socket, OP_TEMPLATE, errno);
    _exit(EXIT_SANDBOX);
}

/* Exactly these capabilities survive the exec, in this user namespace. */
static int keep_capabilities(void)
{
    struct __user_cap_header_struct head = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct kept[2];
    memset(kept, 0, sizeof kept);
    for (size_t i = 0; i < sizeof kept_capabilities / sizeof *kept_capabilities; i++)
        kept[0].effective |= 1U << kept_capabilities[i];
    kept[0].permitted = kept[0].inheritable = kept[0].effective;
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0 || syscall(SYS_capset, &head, kept) < 0)
        return -1;
    for (size_t i = 0; i < sizeof kept_capabilities / sizeof *kept_capabilities; i++)
        if (prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, kept_capabilities[i], 0, 0) < 0)
            return -1;
    return 0;
}

static int split(const char *bytes, size_t size, const char **strings)
{
    int n = 0;
    for (size_t at = 0; at < size && n < MAX_ARGUMENTS; at += strlen(bytes + at) + 1)
        strings[n++] = bytes + at;
    strings[n] = NULL;
    return n > 0 && bytes[size - 1] == 0 ? 0 : -1;
}

_Noreturn void start_template(const struct sandbox *s, const struct step *step)
{
    const char *argv[MAX_ARGUMENTS + 1], *envp[MAX_ARGUMENTS + 1];
    int output[2], socket = s->socket;
    struct pollfd launcher = {.fd = s->life};
    if (prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0) < 0 || poll(&launcher, 1, 0) < 0 || pipe2(output, O_CLOEXEC) < 0)
        fail(socket);
    if (launcher.revents)
        _exit(EXIT_SANDBOX);
    if (split(step->data[0], step->len[0], argv) < 0 || split(step->data[1], step->len[1], envp) < 0) {
        errno = EINVAL;
        fail(socket);
    }
    /* Its streams are of the kind that a command has; nothing but itself reads its output. */
    int null = open("/dev/null", O_RDONLY | O_CLOEXEC);
    int from[] = {null, output[1], output[1], s->template, socket, s->proc, output[0]};
    int n = sizeof from / sizeof *from;
    for (int i = 0; i < n; i++)
        if ((from[i] = fcntl(from[i], F_DUPFD_CLOEXEC, ABOVE)) < 0)
            fail(socket);
    socket = from[TEMPLATE_HOST];
    for (int i = 0; i < n; i++)
        if (dup2(from[i], i) < 0)
            fail(socket);
    if (syscall(SYS_close_range, (unsigned)n, ABOVE - 1U, 0) < 0 || syscall(SYS_close_range, (unsigned)(ABOVE + n), ~0U, 0) < 0 ||
        keep_capabilities() < 0)
        fail(socket);
    execve(argv[0], (char *const *)argv, (char *const *)envp);
    fail(socket);
}

/* Requests a fork, and returns the first process of the sandbox, which is a child of the launcher. A template that does not
 * answer is given up, so that it delays the launcher once. */
pid_t fork_template(const struct forking *f, uint32_t *failed_op)
{
    const struct sandbox *s = f->sandbox;
    int fds[MAX_FDS], nfds = 0, ignored[MAX_FDS];
    const int first[] = {s->socket, s->plan, s->go[0], s->life, s->proc, f->mounts, f->netns};
    for (int i = 0; i < FORK_FDS + (f->netns >= 0); i++)
        fds[nfds++] = first[i];
    if (s->nfds > MAX_FDS - nfds) {
        errno = EPROTO;
        return -1;
    }
    for (int i = 0; i < s->nfds; i++)
        fds[nfds++] = s->fds[i];
    struct forked reply = {.pid = -1};
    struct pollfd answer = {.fd = s->template, .events = POLLIN};
    if (send_message(s->template, s->prepare, sizeof *s->prepare, fds, nfds) < 0)
        return -1;
    int ready = poll(&answer, 1, FORK_WAIT_MS);
    if (ready <= 0 || receive_message(s->template, &reply, sizeof reply, ignored, &nfds, 0) != sizeof reply) {
        shutdown(s->template, SHUT_RDWR);
        errno = ready == 0 ? ETIMEDOUT : ECHILD;
        return -1;
    }
    if (reply.helper > 0)
        waitpid(reply.helper, NULL, 0);
    *failed_op = reply.failed_op;
    errno = reply.error;
    return reply.pid;
}
