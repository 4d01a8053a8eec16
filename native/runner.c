/* Runs one command with two processes: the child waits for the request and becomes the command, the runner reaps and reports.
 *
 * The child is forked ahead and receives the request itself: no process is forked, and no other has to wake up, between the
 * request and the exec. In a pid namespace the runner is process 1: sandboxed code cannot signal it, and its end ends
 * everything inside. Both are confined by the same Landlock domain and system-call filter as the command. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "sbx.h"

#ifndef CLOSE_RANGE_CLOEXEC
#define CLOSE_RANGE_CLOEXEC 4U
#endif

/* The limits in a request are read in place, so they must be aligned there. */
static union { _Alignas(struct exec_rlimit) char bytes[MAX_MESSAGE]; struct exec_msg exec; } request;
_Static_assert(sizeof(struct exec_msg) % _Alignof(struct exec_rlimit) == 0, "the body is aligned");
static char *strings[MAX_STRINGS];
static char child_stack[65536] __attribute__((aligned(16)));
void (*continue_template)(char **envp);

struct command {
    int socket;
    const struct built *built;
    const struct exec_msg *head;
    struct exec_body body;
    int stdio[3], wait, slot;
    /* Written by the child, which shares our memory until it has exec'd or ended. */
    volatile uint32_t failed_op, at;
    volatile int error, unused, report_start;
    volatile pid_t inside; /* the pid of the command as it sees it itself */
    int joins, wake;       /* it is forked into a machine; `wake` is our end of the pipe that its exec closes */
    pid_t runner, pid;
    uint32_t (*confine)(void);
};

static _Noreturn void fail(int socket, uint32_t op, int error)
{
    report_failure(socket, op, error);
    _exit(EXIT_SANDBOX);
}

static _Noreturn void child_fail(struct command *c, uint32_t op, int error)
{
    c->error = error;
    c->failed_op = op;
    _exit(EXIT_NOT_EXECUTED);
}

static int fill_slot(int slot, int source)
{
    struct stat st;
    if (fstat(source, &st) < 0)
        return -1;
    off_t at = 0;
    while (at < st.st_size) {
        ssize_t sent = sendfile(slot, source, &at, (size_t)(st.st_size - at));
        if (sent <= 0)
            return -1;
    }
    return 0;
}

/* A large request is in a file of its own. With a wrong size, reading beyond the file would raise SIGBUS. */
static char *map_payload(int fd, size_t size)
{
    struct stat st;
    if (fstat(fd, &st) < 0)
        return NULL;
    if (st.st_size < 0 || (size_t)st.st_size != size) {
        errno = EPROTO;
        return NULL;
    }
    char *body = mmap(NULL, size, PROT_READ, MAP_PRIVATE, fd, 0);
    return body == MAP_FAILED ? NULL : body;
}

/* The child has received its request: from now on the runner gets SIGIO for messages on the socket. It is signalled at once
 * if a message has arrived meanwhile, or if it must report the start of the command. */
static void hand_over_socket(struct command *c)
{
    char byte;
    if (c->confine)
        return; /* its runner reads the socket itself, after the exec */
    if (fcntl(c->socket, F_SETFL, O_ASYNC) < 0)
        child_fail(c, OP_REQUEST, errno);
    int empty = recv(c->socket, &byte, 1, MSG_PEEK | MSG_DONTWAIT) < 0 && errno == EAGAIN;
    if (!c->report_start && empty)
        return;
    if (c->joins) { /* the runner is outside of our pid namespace, and is signalled at the exec */
        if (fcntl(c->wake, F_SETFL, O_ASYNC) < 0)
            child_fail(c, OP_REQUEST, errno);
        return;
    }
    if (getppid() != c->runner)
        _exit(EXIT_NOT_EXECUTED); /* it is gone: another process may have its pid, and must not be signalled */
    if (kill(c->runner, SIGIO) < 0)
        child_fail(c, OP_REQUEST, errno);
}

/* Waits for the request and decodes it, with its descriptors. */
static void receive_request(struct command *c)
{
    int fds[MAX_FDS], nfds;
    char byte;
    struct exec_fds places;
    /* In a machine the child may be killed by another command: it must be known whether it has taken its request. */
    if (c->joins && recv(c->socket, &byte, 1, MSG_PEEK) > 0)
        c->at = OP_STDIO;
    ssize_t got = receive_message(c->socket, request.bytes, sizeof request, fds, &nfds, 0);
    if (got < 0)
        child_fail(c, OP_REQUEST, errno);
    if (got == 0) {
        c->unused = 1; /* the host closed the socket */
        _exit(EXIT_SANDBOX);
    }
    c->at = OP_STDIO;
    const struct exec_msg *h = c->head = &request.exec;
    if (request_type(request.bytes, (size_t)got) != MSG_EXEC)
        child_fail(c, OP_REQUEST, EPROTO);
    /* Sandboxed code will have the runner's ids: it must not be able to trace or read the runner. */
    if (prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) < 0)
        child_fail(c, OP_PROCESS, errno);
    if (exec_layout(h, nfds, c->built->nslots, &places) < 0)
        child_fail(c, OP_REQUEST, EPROTO);
    for (int i = 0; i < 3; i++)
        c->stdio[i] = places.stdio[i] >= 0 ? fds[places.stdio[i]] : -1;
    if (places.script >= 0 && fill_slot(c->built->slots[h->slot], fds[places.script]) < 0)
        child_fail(c, OP_SCRIPT, errno);
    char *body = request.bytes + sizeof *h;
    size_t size = (size_t)got - sizeof *h;
    if (places.payload >= 0) {
        size = h->size;
        body = map_payload(fds[places.payload], size);
        if (!body)
            child_fail(c, OP_REQUEST, errno);
    }
    c->wait = places.wait >= 0 ? fds[places.wait] : -1;
    c->slot = places.wait >= 0 ? c->built->slots[h->slot] : -1;
    c->report_start = (h->flags & EXEC_REPORT_START) != 0;
    hand_over_socket(c);
    if (exec_decode(h, body, size, strings, &c->body) < 0)
        child_fail(c, OP_REQUEST, EPROTO);
}

/* Runs in the memory of the runner, which sleeps until the exec: system calls only. */
static int child(void *arg)
{
    struct command *c = arg;
    sigset_t none;
    c->inside = getpid();
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    struct simple_msg waiting = {.type = MSG_WAITING, .a = (int32_t)c->inside};
    if (c->joins && send_message(c->socket, &waiting, sizeof waiting, NULL, 0) < 0)
        child_fail(c, OP_PROCESS, errno);
    if (setsid() < 0)
        child_fail(c, OP_PROCESS, errno);
    uint32_t refused = c->confine ? c->confine() : 0;
    if (refused)
        child_fail(c, refused, errno);
    int null = open("/dev/null", O_RDONLY | O_CLOEXEC); /* opened ahead: most commands have no other input */
    receive_request(c);
    int terminal = -1;
    if ((c->head->flags & EXEC_TTY) && (terminal = send_terminal(c->socket, c->built->has_terminal ? c->built->terminal : NULL, c->head->rows, c->head->cols)) < 0)
        child_fail(c, OP_TTY, errno);
    for (int i = 0; i < 3; i++) {
        int fd = terminal >= 0 ? terminal : c->stdio[i];
        if (fd < 0 && i == 0)
            fd = null >= 0 ? null : open("/dev/null", O_RDONLY | O_CLOEXEC);
        else if (fd < 0)
            fd = open("/dev/null", O_WRONLY | O_CLOEXEC);
        /* Sources are all above 2, so none of the three is overwritten before its turn. */
        if (fd < 3 || dup2(fd, i) < 0)
            child_fail(c, OP_STDIO, errno);
    }
    if (c->wait >= 0) {
        /* First above both numbers: each may have the number of the other, or its own, which the exec would close. */
        int wait = fcntl(c->wait, F_DUPFD_CLOEXEC, SLOT_FD + 1), slot = fcntl(c->slot, F_DUPFD_CLOEXEC, SLOT_FD + 1);
        if (wait < 0 || slot < 0 || dup2(wait, WAIT_FD) < 0 || dup2(slot, SLOT_FD) < 0)
            child_fail(c, OP_STDIO, errno);
    }
    if (terminal >= 0 && ioctl(0, TIOCSCTTY, 0) < 0)
        child_fail(c, OP_TTY, errno);
    for (uint32_t i = 0; i < c->head->rlimits; i++) {
        struct rlimit limit = {.rlim_cur = c->body.rlimits[i].soft, .rlim_max = c->body.rlimits[i].hard};
        if (setrlimit((int)c->body.rlimits[i].resource, &limit) < 0)
            child_fail(c, OP_RLIMIT, errno);
    }
    if (chdir(c->body.cwd) < 0)
        child_fail(c, OP_CHDIR, errno);
    /* Descriptors are closed by the exec, not before: the closed pipe is how the runner notices the exec. */
    if (syscall(SYS_close_range, 3U, c->wait >= 0 ? WAIT_FD - 1U : ~0U, CLOSE_RANGE_CLOEXEC) < 0 ||
        (c->wait >= 0 && syscall(SYS_close_range, SLOT_FD + 1U, ~0U, CLOSE_RANGE_CLOEXEC) < 0))
        child_fail(c, OP_FDS, errno);
    int denied = 0;
    c->at = OP_EXEC;
    if (continue_template) {
        char **envp = c->body.envp;
        int keep[] = {WAIT_FD, SLOT_FD};
        if (c->wait < 0 || close_all_but(keep, 2) < 0)
            child_fail(c, OP_FDS, c->wait < 0 ? EPROTO : errno);
        munmap(c, sizeof *c);
        continue_template(envp);
    }
    for (char **program = c->body.programs; *program; program++) {
        execve(*program, c->body.argv, c->body.envp);
        if (errno == EACCES)
            denied = 1;
        else if (errno != ENOENT && errno != ENOTDIR)
            child_fail(c, OP_EXEC, errno);
    }
    child_fail(c, OP_EXEC, denied ? EACCES : errno);
}

static struct command memory;
/* In a fork of a template the child has memory of its own, and this is a page that both processes map. */
static struct command *command = &memory;
static int exec_pipe = -1, life_pipe = -1;

/* Signals the whole tree except the runner. Outside a pid namespace kill(-1) would reach the whole host. In a machine this is
 * the command alone: the machine's first process signals the rest. */
static void signal_tree(int signum)
{
    if (command->joins)
        kill(command->pid, signum);
    else if (getpid() == 1)
        kill(-1, signum);
    else
        kill_children(signum, NULL);
}

/* Orphans are reparented to the runner: when it has no child, no process is left. */
static void end_everything(void)
{
    while (waitpid(-1, NULL, WNOHANG) >= 0 || errno != ECHILD) {
        signal_tree(SIGKILL);
        if (waitpid(-1, NULL, 0) < 0 && errno == ECHILD)
            return;
    }
}

/* Processes that the command leaves in its machine go on. */
static void leave_everything(void)
{
}

static int is_running(void)
{
    return !command->failed_op && command->at == OP_EXEC;
}

/* Sleeps until the child has exec'd or ended: then the last writing end of the pipe is closed. */
void await_exec(void)
{
    char byte;
    if (exec_pipe < 0)
        return;
    while (read(exec_pipe, &byte, 1) < 0)
        if (errno != EINTR)
            _exit(EXIT_SANDBOX);
    close(exec_pipe);
    exec_pipe = -1;
    struct simple_msg started = {.type = MSG_STARTED, .a = (int32_t)command->inside};
    if (command->report_start && is_running() && send_message(command->socket, &started, sizeof started, NULL, 0) < 0) {
        end_everything();
        _exit(EXIT_SANDBOX);
    }
}

/* The process whose end is that of the command. The handler changes it before waitpid() returns to its caller, so the end of
 * the process before is not taken for that of the command. */
static volatile pid_t followed;

/* The host has sent a message or closed its socket, or the launcher has ended. The handler interrupts waitpid() and does all
 * the work itself, so no event can be lost between a check and the sleep. Sandboxed code can send this signal too, which
 * only causes a needless check. Until the exec the child shares our memory: nothing that it uses is written here. */
static void on_sigio(int signum)
{
    (void)signum;
    int fds[MAX_FDS], nfds, error = errno;
    struct pollfd launcher = {.fd = life_pipe};
    struct simple_msg msg;
    ssize_t got;
    /* poll fails where sandboxed code has lowered our RLIMIT_NOFILE; the host also notices the launcher's end, and
     * closes its socket. */
    if (poll(&launcher, 1, 0) > 0)
        _exit(EXIT_SANDBOX);
    if (command->at == OP_REQUEST)
        return;
    await_exec();
    do {
        got = receive_message(command->socket, &msg, sizeof msg, fds, &nfds, MSG_DONTWAIT);
        for (int i = 0; i < nfds; i++)
            close(fds[i]);
        uint32_t type = got > 0 ? request_type(&msg, (size_t)got) : 0;
        if (type == MSG_SIGNAL)
            signal_command(&msg);
        else if (type == MSG_FOLLOW && msg.a > 1 && kill(msg.a, 0) == 0) /* sandboxed code names it: it may not exist */
            followed = msg.a;
    } while (got > 0 || (got < 0 && (errno == EMSGSIZE || errno == EMFILE)));
    if (got == 0 || errno != EAGAIN) { /* the host closed the socket: end everything */
        end_everything();
        _exit(EXIT_SANDBOX);
    }
    errno = error;
}

/* The flags set here apply to all processes that share the open file; the life pipe, if any, is this sandbox's alone. */
static int enable_sigio(int socket, int life)
{
    struct sigaction action = {.sa_handler = on_sigio, .sa_flags = SA_RESTART};
    life_pipe = life;
    if (sigaction(SIGIO, &action, NULL) < 0 || fcntl(socket, F_SETOWN, getpid()) < 0)
        return -1;
    if (life < 0)
        return 0;
    return fcntl(life, F_SETOWN, getpid()) < 0 ? -1 : fcntl(life, F_SETFL, O_ASYNC);
}

static void mask_sigio(int how)
{
    sigset_t mask;
    sigemptyset(&mask);
    sigaddset(&mask, SIGIO);
    sigprocmask(how, &mask, NULL);
}

/* A process that sleeps in waitpid() is woken on the processor where the command has just ended, not on a busy one. */
static int await_end(pid_t main_child)
{
    int status = 0;
    pid_t pid;
    followed = main_child;
    mask_sigio(SIG_UNBLOCK);
    /* In a machine, other commands can signal the child also before the exec. Stopped, it would never receive its request. */
    while ((pid = waitpid(-1, &status, command->joins ? WUNTRACED : 0)) != followed || WIFSTOPPED(status))
        if (pid < 0 && errno != EINTR)
            _exit(EXIT_SANDBOX);
        else if (pid == main_child && command->at != OP_EXEC)
            kill(pid, SIGCONT);
    mask_sigio(SIG_BLOCK);
    return status;
}

static _Noreturn void report_end(int socket, int status)
{
    struct rusage used;
    getrusage(RUSAGE_CHILDREN, &used);
    struct exited_msg msg = {
        .type = MSG_EXITED,
        .status = status,
        .user_us = (uint64_t)used.ru_utime.tv_sec * 1000000u + (uint64_t)used.ru_utime.tv_usec,
        .system_us = (uint64_t)used.ru_stime.tv_sec * 1000000u + (uint64_t)used.ru_stime.tv_usec,
        .maxrss_kib = (uint64_t)used.ru_maxrss,
    };
    send_message(socket, &msg, sizeof msg, NULL, 0);
    sched_yield(); /* lets the host run first, if it was woken on this processor: our own exit takes long */
    _exit(0);
}

pid_t begin_command(int socket, const struct built *built, uint32_t (*confine)(void))
{
    int ends[2];
    if (continue_template) {
        /* Sandboxed code will have the runner's ids, and never shares its memory. */
        void *page = mmap(NULL, sizeof memory, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        if (page == MAP_FAILED || prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) < 0)
            fail(socket, OP_PROCESS, errno);
        command = page;
    }
    struct command *c = command;
    c->socket = socket;
    c->built = built;
    c->at = OP_REQUEST;
    c->runner = getpid();
    c->confine = confine;
    c->joins = built->label != 0;
    if (pipe2(ends, O_CLOEXEC) < 0 || (c->joins && fcntl(ends[0], F_SETOWN, getpid()) < 0))
        fail(socket, OP_FDS, errno);
    c->wake = ends[0];
    /* fork() also runs what libraries of the template have registered for it. */
    pid_t pid = continue_template ? fork() : clone(child, child_stack + sizeof child_stack, CLONE_VM | SIGCHLD, c);
    if (pid < 0)
        fail(socket, OP_FORK, errno);
    if (pid == 0)
        child(c);
    c->pid = pid;
    close(ends[1]);
    exec_pipe = ends[0];
    for (int i = 0; i < built->nslots && !c->joins; i++)
        close(built->slots[i]);
    return c->pid;
}

void signal_command(const struct simple_msg *msg)
{
    msg->id ? (void)kill(-command->pid, msg->a) : signal_tree(msg->a);
}

_Noreturn void finish_command(int status, void (*end_all)(void))
{
    const struct command *c = command;
    int socket = c->socket;
    if (c->unused)
        _exit(0);
    if (c->failed_op)
        fail(socket, c->failed_op, c->error);
    /* In a machine it may be another command that has killed the child: that is an end of the command. */
    if (c->joins && c->at != OP_EXEC && WIFSIGNALED(status))
        report_end(socket, status);
    /* The child was killed before the exec: that is not how the command ended. */
    if (c->at != OP_EXEC)
        fail(socket, c->at, ECHILD);
    end_all();
    report_end(socket, status);
}

_Noreturn void runner_main(int socket, const struct built *built)
{
    mask_sigio(SIG_BLOCK);
    if (enable_sigio(socket, built->life) < 0)
        fail(socket, OP_FDS, errno);
    int status = await_end(begin_command(socket, built, NULL));
    while (command->joins && command->at == OP_REQUEST && WIFSIGNALED(status)) { /* killed while it waited: make another */
        close(exec_pipe);
        status = await_end(begin_command(socket, built, NULL));
    }
    finish_command(status, built->label ? leave_everything : end_everything);
}
