/* The runner of a command that is confined by Landlock and filters instead of namespaces.
 *
 * The runner stays outside the domain of its command: it reaps, ends the tree, and performs the system calls that the
 * command's filter notifies. It never lets such a call continue. It reads the arguments once, opens what they name, judges
 * the descriptor, and acts on that descriptor, so there is no moment between the check and the act. Connections are made by
 * the host, which has the policy; the connected socket takes the place of the caller's. */
#include <errno.h>
#include <fcntl.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "sbx.h"

#ifndef SYS_openat2
#define SYS_openat2 437
#endif
enum { MAX_PENDING = 256, MAX_PATH = 4096, MAX_TREE = 8192, MAX_DEPTH = 4096, NO_MAGIC_LINKS = 2, LATER = 1, PAGE = 4096,
       MAX_ROUNDS = 1000, RETRY_MS = 1 };

/* A connection that the host makes; `fd` is the caller's socket. */
struct pending { uint64_t notification; uint32_t id; pid_t tid; int fd; };

static struct pending pending[MAX_PENDING];
static int npending, control = -1;
static uint32_t last_id;
static struct built *state;
static struct step *own_steps;
static int first_step, nsteps, notify_socket = -1;
/* The kernel may have longer structures than these headers. */
/* cppcheck-suppress unusedStructMember */
static union { struct seccomp_notif notif; char space[512]; } received;
/* cppcheck-suppress unusedStructMember */
static union { struct seccomp_notif_resp resp; char space[512]; } reply;
static struct seccomp_notif_sizes sizes;

/* Runs in the process of the command. */
static uint32_t confine(void)
{
    uint32_t failed = 0;
    if (perform_steps(own_steps, first_step, nsteps, state, &failed) < 0)
        return failed;
    /* The command must never answer its own calls. The runner writes to `state` as soon as it has the descriptor. */
    SCOPED_FD notify = state->notify;
    SCOPED_FD to_runner = notify_socket;
    struct simple_msg ready = {.type = MSG_READY};
    /* The command must not outlive its runner. */
    if (prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0) < 0 || send_message(to_runner, &ready, sizeof ready, &notify, notify >= 0) < 0)
        return OP_PROCESS;
    return 0;
}

/* Whether the call is still waiting: then nothing that was read from its process can be of another one. */
static int is_waiting(uint64_t id)
{
    return ioctl(state->notify, SECCOMP_IOCTL_NOTIF_ID_VALID, &id) == 0;
}

static int read_memory(pid_t tid, uint64_t at, void *to, size_t size)
{
    /* NOLINTNEXTLINE(performance-no-int-to-ptr): an address of another process */
    struct iovec here = {to, size}, there = {(void *)(uintptr_t)at, size};
    return process_vm_readv(tid, &here, 1, &there, 1, 0) == (ssize_t)size ? 0 : -EFAULT;
}

/* Reads a string, page by page: the page after its end may not exist. */
static int read_text(pid_t tid, uint64_t at, char *to, size_t size)
{
    for (size_t got = 0; got < size;) {
        size_t piece = PAGE - (at + got) % PAGE;
        if (piece > size - got)
            piece = size - got;
        if (read_memory(tid, at + got, to + got, piece) < 0)
            return -EFAULT;
        if (memchr(to + got, 0, piece))
            return 0;
        got += piece;
    }
    return -ENAMETOOLONG;
}

static int open_of(pid_t tid, const char *kind, int fd)
{
    char name[64];
    if (fd >= 0)
        snprintf(name, sizeof name, "/proc/%d/%s/%d", (int)tid, kind, fd);
    else
        snprintf(name, sizeof name, "/proc/%d/%s", (int)tid, kind);
    return open(name, O_PATH | O_CLOEXEC);
}

/* Opens what a call names, as its process would. No link of /proc is followed: it would lead to files of the runner. */
static int open_named(pid_t tid, const struct mediated *call, const char *path)
{
    uint64_t how[3] = {O_PATH | O_CLOEXEC | (call->follow ? 0U : O_NOFOLLOW), 0, NO_MAGIC_LINKS};
    SCOPED_FD base = -1;
    if (path[0] != '/') {
        base = call->fd == AT_FDCWD ? open_of(tid, "cwd", -1) : call->fd < 0 ? -1 : open_of(tid, "fd", call->fd);
        if (base < 0)
            return -EBADF;
        if (!path[0])
            return take_fd(&base);
    }
    int fd = (int)syscall(SYS_openat2, base >= 0 ? base : AT_FDCWD, path, how, sizeof how);
    return fd < 0 ? -errno : fd;
}

/* Whether a descriptor is of a file below a path that the command may write. */
static int may_change(int fd)
{
    char name[64], path[MAX_PATH + 1];
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(name, path, MAX_PATH);
    if (n <= 0 || n >= MAX_PATH)
        return 0;
    path[n] = 0;
    return is_below(path, state->mediate->data[1], state->mediate->len[1]);
}

/* Changes the mode or the times of a file. */
static int change_file(const struct seccomp_notif *n, const struct mediated *call)
{
    char path[MAX_PATH] = "", name[64];
    struct timespec when[2];
    pid_t tid = (pid_t)n->pid;
    int error = call->path ? read_text(tid, call->path, path, sizeof path) : 0;
    if (!error && call->kind == MEDIATED_TIMES) {
        unsigned char data[MEDIATED_DATA_SIZE];
        size_t size = call->format == TIMES_NOW ? 0 : call->size;
        error = size ? read_memory(tid, call->data, data, size) : 0;
        error = error ? error : times_decode(data, size, call->format, when);
    }
    if (error)
        return error;
    SCOPED_FD fd = open_named(tid, call, path);
    if (fd < 0)
        return take_fd(&fd);
    if (!may_change(fd) || !is_waiting(n->id))
        return -EPERM;
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    if (call->kind == MEDIATED_MODE)
        return chmod(name, (mode_t)call->mode) < 0 ? -errno : 0;
    return utimensat(fd, "", when, AT_EMPTY_PATH) < 0 ? -errno : 0;
}

/* Returns a number from the status of a process or thread, 0 if it is gone. The kernel escapes newlines in names. */
static pid_t status_of(pid_t pid, const char *field)
{
    char name[64], text[1024];
    snprintf(name, sizeof name, "/proc/%d/status", (int)pid);
    SCOPED_FD fd = open(name, O_RDONLY | O_CLOEXEC);
    ssize_t got = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
    text[got > 0 ? got : 0] = 0;
    const char *at = strstr(text, field);
    return at ? (pid_t)strtol(at + strlen(field), NULL, 10) : 0;
}

/* Whether a process is part of this command's tree. Orphans are reparented to us. */
static int is_ours(pid_t pid)
{
    for (int i = 0; pid > 1 && i < MAX_DEPTH; i++)
        if ((pid = status_of(pid, "\nPPid:\t")) == getpid())
            return 1;
    return 0;
}

/* The descriptor keeps the process the same between the check and the signal. */
static int signal_ours(pid_t pid, int signum)
{
    SCOPED_FD fd = (int)syscall(SYS_pidfd_open, pid, 0U);
    if (fd < 0)
        return -errno;
    if (!is_ours(pid))
        return -EPERM;
    return syscall(SYS_pidfd_send_signal, fd, signum, NULL, 0U) < 0 ? -errno : 0;
}

static int signal_group(pid_t caller, pid_t target, int signum)
{
    static pid_t pids[MAX_TREE];
    if (target == INT32_MIN)
        return -ESRCH;
    pid_t group = target == 0 ? getpgid(caller) : -target, self = status_of(caller, "\nTgid:\t");
    int result = -ESRCH, n = list_tree(pids, MAX_TREE);
    for (int i = 0; i < n; i++)
        if (target == -1 ? pids[i] != self : getpgid(pids[i]) == group)
            result = signal_ours(pids[i], signum) == 0 ? 0 : result;
    return result;
}

/* The caller is waiting, so its process cannot end: the kernel checks that the thread is of that process. */
static int signal_thread(pid_t caller, const struct mediated *call)
{
    pid_t self = status_of(caller, "\nTgid:\t");
    if (self <= 0 || (call->pid && call->pid != self))
        return -EPERM;
    return syscall(SYS_tgkill, self, call->tid, call->signum) < 0 ? -errno : 0;
}

/* Puts `fd` in the place of the caller's socket, with the two flags that the caller has set on it. */
static int replace_socket(uint64_t id, pid_t tid, int fd, int theirs)
{
    char name[64], text[256];
    unsigned long flags = 0;
    snprintf(name, sizeof name, "/proc/%d/fdinfo/%d", (int)tid, theirs);
    SCOPED_FD info = open(name, O_RDONLY | O_CLOEXEC);
    ssize_t got = info < 0 ? -1 : read(info, text, sizeof text - 1);
    if (got > 0) {
        text[got] = 0;
        const char *at = strstr(text, "flags:");
        flags = at ? strtoul(at + 6, NULL, 8) : 0;
    }
    if (fcntl(fd, F_SETFL, (int)(flags & O_NONBLOCK)) < 0)
        return -errno;
    struct seccomp_notif_addfd add = {.id = id, .flags = SECCOMP_ADDFD_FLAG_SETFD, .srcfd = (uint32_t)fd,
                                      .newfd = (uint32_t)theirs, .newfd_flags = (uint32_t)(flags & O_CLOEXEC)};
    return ioctl(state->notify, SECCOMP_IOCTL_NOTIF_ADDFD, &add) < 0 ? -errno : 0;
}

static int dial_unix(int found, int type)
{
    struct sockaddr_un to = {.sun_family = AF_UNIX};
    snprintf(to.sun_path, sizeof to.sun_path, "/proc/self/fd/%d", found);
    SCOPED_FD fd = socket(AF_UNIX, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0 || connect(fd, (struct sockaddr *)&to, sizeof to) < 0)
        return -errno;
    return take_fd(&fd);
}

/* Only a socket on which this command's own tree listens: one of another run may have another network. */
static int connect_unix(const struct seccomp_notif *n, const struct mediated *call, const struct destination *to)
{
    struct mediated by_path = {.fd = AT_FDCWD, .follow = 1};
    struct ucred peer;
    socklen_t size = sizeof peer;
    SCOPED_FD found = open_named((pid_t)n->pid, &by_path, to->path);
    if (found < 0)
        return take_fd(&found);
    if (!may_change(found) || !is_waiting(n->id))
        return -EACCES;
    SCOPED_FD fd = dial_unix(found, SOCK_STREAM);
    if (fd == -EPROTOTYPE)
        fd = dial_unix(found, SOCK_SEQPACKET);
    if (fd < 0)
        return take_fd(&fd);
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) < 0 || !is_ours(peer.pid))
        return -EACCES;
    return replace_socket(n->id, (pid_t)n->pid, fd, call->fd);
}

static int is_socket(pid_t tid, int fd)
{
    char name[64], link[16] = "";
    snprintf(name, sizeof name, "/proc/%d/fd/%d", (int)tid, fd);
    return readlink(name, link, sizeof link - 1) > 0 && strncmp(link, "socket:", 7) == 0;
}

/* Returns LATER for a connection that the host was asked for. */
static int connect_for(const struct seccomp_notif *n, const struct mediated *call)
{
    unsigned char data[MEDIATED_DATA_SIZE];
    struct destination to;
    int error = read_memory((pid_t)n->pid, call->data, data, call->size);
    error = error ? error : destination_decode(data, call->size, &to);
    if (error)
        return error;
    if (!is_socket((pid_t)n->pid, call->fd) || !is_waiting(n->id))
        return -ENOTSOCK;
    if (to.family == AF_UNIX)
        return connect_unix(n, call, &to);
    if (!(state->mediate->a[0] & MEDIATE_CONNECT))
        return -EACCES;
    for (int i = 0; i < npending; i++)
        if (!is_waiting(pending[i].notification))
            pending[i--] = pending[--npending];
    if (npending == MAX_PENDING)
        return -EAGAIN;
    struct connect_msg msg = {.type = MSG_CONNECT, .id = ++last_id, .family = (uint32_t)to.family, .port = to.port};
    memcpy(&msg.address_start, to.address, sizeof msg.address_start);
    memcpy(&msg.address_end, to.address + sizeof msg.address_start, sizeof msg.address_end);
    if (send(control, &msg, sizeof msg, MSG_NOSIGNAL | MSG_DONTWAIT) < 0)
        return -EAGAIN;
    pending[npending++] = (struct pending){.notification = n->id, .id = last_id, .tid = (pid_t)n->pid, .fd = call->fd};
    return LATER;
}

static void respond(uint64_t id, int error)
{
    memset(&reply, 0, sizeof reply);
    reply.resp.id = id;
    reply.resp.error = error;
    (void)ioctl(state->notify, SECCOMP_IOCTL_NOTIF_SEND, &reply.resp); /* the caller may be gone */
}

static int perform_call(const struct seccomp_notif *n)
{
    struct mediated call;
    uint64_t args[6];
    for (int i = 0; i < 6; i++)
        args[i] = n->data.args[i];
    int error = mediated_decode(n->data.nr, args, &call);
    if (error)
        return error;
    switch (call.kind) {
    case MEDIATED_CONNECT: return connect_for(n, &call);
    case MEDIATED_MODE:
    case MEDIATED_TIMES: return change_file(n, &call);
    case MEDIATED_KILL:
        return call.pid > 0 ? signal_ours(call.pid, call.signum) : signal_group((pid_t)n->pid, call.pid, call.signum);
    case MEDIATED_THREAD: return signal_thread((pid_t)n->pid, &call);
    }
    return -EPERM;
}

static void on_notification(void)
{
    memset(&received, 0, sizeof received);
    if (ioctl(state->notify, SECCOMP_IOCTL_NOTIF_RECV, &received.notif) < 0)
        return; /* the caller has been killed meanwhile */
    uint64_t id = received.notif.id;
    int result = perform_call(&received.notif);
    if (result != LATER)
        respond(id, result < 0 ? result : 0);
}

static void on_connected(const struct simple_msg *msg, int fd)
{
    for (int i = 0; i < npending; i++) {
        if (pending[i].id != msg->id)
            continue;
        struct pending call = pending[i];
        pending[i] = pending[--npending];
        int error = msg->a ? -msg->a : fd < 0 ? -EPROTO : replace_socket(call.notification, call.tid, fd, call.fd);
        respond(call.notification, error);
        return;
    }
}

/* First all processes are stopped, until a look finds no new one: a stopped process cannot fork. Then they are killed. */
static void end_tree(void)
{
    static pid_t pids[MAX_TREE];
    uint64_t before = 0;
    int n;
    for (int round = 0; round < MAX_ROUNDS; round++) {
        uint64_t seen = 1;
        n = list_tree(pids, MAX_TREE);
        for (int i = 0; i < n; i++) {
            seen = seen * 31 + (uint64_t)pids[i];
            kill(pids[i], SIGSTOP);
        }
        if (seen == before)
            break;
        before = seen;
    }
    for (;;) {
        pid_t reaped;
        n = list_tree(pids, MAX_TREE);
        for (int i = n - 1; i >= 0; i--)
            kill(pids[i], SIGKILL);
        while ((reaped = waitpid(-1, NULL, WNOHANG)) > 0)
            ;
        if (reaped < 0 && errno == ECHILD)
            return;
        poll(NULL, 0, RETRY_MS);
    }
}

/* Returns 0 when the host has closed its socket. */
static int on_message(pid_t child)
{
    struct simple_msg msg;
    int fds[MAX_FDS], nfds;
    ssize_t got = receive_message(control, &msg, sizeof msg, fds, &nfds, MSG_DONTWAIT);
    int wanted = got < 0 && (errno == EAGAIN || errno == EMSGSIZE || errno == EMFILE);
    switch (got > 0 ? request_type(&msg, (size_t)got) : 0) {
    case MSG_SIGNAL:
        /* A tree that forks faster than it is listed is mostly one group, which stops at once. */
        if (msg.a == SIGKILL && !msg.id)
            kill(-child, SIGKILL);
        signal_command(&msg);
        break;
    case MSG_CONNECTED: on_connected(&msg, nfds == 1 ? fds[0] : -1); break;
    default: break;
    }
    for (int i = 0; i < nfds; i++)
        close(fds[i]);
    return got > 0 || wanted;
}

/* Returns the exit status of the command. */
static int mediate(pid_t child, int signals)
{
    for (;;) {
        struct pollfd events[3] = {{.fd = signals, .events = POLLIN}, {.fd = control, .events = POLLIN},
                                   {.fd = state->notify, .events = POLLIN}};
        struct signalfd_siginfo info;
        int status;
        if (poll(events, 3, -1) < 0 && errno != EINTR)
            _exit(EXIT_SANDBOX);
        if (events[2].revents & POLLIN) {
            on_notification();
        } else if (events[2].revents) { /* no process with this filter is left */
            close(state->notify);
            state->notify = -1;
        }
        if (events[1].revents && !on_message(child)) {
            kill(-child, SIGSTOP);
            end_tree();
            _exit(EXIT_SANDBOX);
        }
        if (!events[0].revents)
            continue;
        while (read(signals, &info, sizeof info) > 0)
            ;
        for (;;) {
            siginfo_t ended = {0};
            if (waitid(P_ALL, 0, &ended, WEXITED | WNOHANG | WNOWAIT) < 0 || ended.si_pid == 0)
                break;
            if (ended.si_pid == child)
                kill(-child, SIGSTOP); /* before it is reaped: until then its number is no other group's */
            if (waitpid(ended.si_pid, &status, 0) == child)
                return status;
        }
    }
}

static _Noreturn void fail(int error)
{
    report_failure(control, OP_PROCESS, error);
    _exit(EXIT_SANDBOX);
}

_Noreturn void confined_main(int socket, struct built *built, int life, struct step *steps, int from, int n)
{
    struct pollfd launcher = {.fd = life};
    struct simple_msg ready;
    int pair[2], fds[MAX_FDS], nfds, status;
    sigset_t mask;
    control = socket;
    state = built;
    own_steps = steps;
    first_step = from;
    nsteps = n;
    /* Changing ids clears the parent-death signal and hides this process from an unprivileged host, which inspects it. */
    if (prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0) < 0 || prctl(PR_SET_DUMPABLE, 1, 0, 0, 0) < 0 || poll(&launcher, 1, 0) < 0)
        fail(errno);
    if (launcher.revents)
        _exit(EXIT_SANDBOX);
    int keep[4], kept = 0;
    keep[kept++] = socket;
    for (int i = 0; built->has_terminal && i < 2; i++)
        keep[kept++] = built->terminal[i];
    sigemptyset(&mask);
    sigaddset(&mask, SIGCHLD);
    sigprocmask(SIG_BLOCK, &mask, NULL);
    if (close_all_but(keep, kept) < 0 || socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) < 0 ||
        syscall(SYS_seccomp, SECCOMP_GET_NOTIF_SIZES, 0U, &sizes) < 0)
        fail(errno);
    if (sizes.seccomp_notif > sizeof received || sizes.seccomp_notif_resp > sizeof reply)
        fail(EMSGSIZE);
    int signals = signalfd(-1, &mask, SFD_CLOEXEC | SFD_NONBLOCK);
    if (signals < 0)
        fail(errno);
    notify_socket = pair[1];
    pid_t child = begin_command(socket, built, confine);
    close(pair[1]);
    for (int i = 0; built->has_terminal && i < 2; i++)
        close(built->terminal[i]);
    /* Until the exec the command's process shares our memory, errno included: this process only sleeps meanwhile. */
    ssize_t got = receive_message(pair[0], &ready, sizeof ready, fds, &nfds, 0);
    close(pair[0]);
    if (got != (ssize_t)sizeof ready || nfds > 1) {
        waitpid(child, &status, 0);
        finish_command(status, end_tree);
    }
    built->notify = nfds == 1 ? fds[0] : -1;
    struct simple_msg answer = {.type = MSG_READY, .a = (int32_t)getpid()};
    if (send_message(socket, &answer, sizeof answer, NULL, 0) < 0)
        _exit(EXIT_SANDBOX);
    await_exec();
    status = mediate(child, signals);
    finish_command(status, end_tree);
}
