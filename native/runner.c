/* Runs one command: a process that waits for the request and becomes the command, and one that reaps and reports.
 *
 * The first of the two is forked ahead, so that a request reaches it directly: nothing is forked, and nobody else has to
 * wake up, between the request and the exec. In a pid namespace the other one is process 1: sandboxed code cannot signal
 * it, and its end is the end of everything inside. Both sit under the same Landlock domain and system-call filter as the
 * command. */
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

/* The limits in a request are read where they came, so they have to be aligned there. */
static union { _Alignas(struct exec_rlimit) char bytes[MAX_MESSAGE]; struct exec_msg exec; } request;
_Static_assert(sizeof(struct exec_msg) % _Alignof(struct exec_rlimit) == 0, "the body begins aligned");
static char *strings[MAX_STRINGS];
static char child_stack[65536] __attribute__((aligned(16)));

struct command {
    int socket;
    const struct built *built;
    const struct exec_msg *head;
    struct exec_body body;
    int stdio[3], wait, slot;
    /* Written by the child, which shares our memory until it has exec'd or ended. */
    volatile uint32_t failed_op, at;
    volatile int error, unused, tell;
    pid_t runner, pid;
};

static _Noreturn void child_fail(struct command *c, uint32_t op, int error)
{
    c->error = error;
    c->failed_op = op;
    _exit(126);
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

/* A large request comes in a file of its own. A size that is not the file's would be a fault later, on reading. */
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

/* The request was the last word for us: from now on the other process is told of any. It is told at once of what has come
 * meanwhile, and if it has to say that the command runs. */
static void hand_on_words(struct command *c)
{
    char byte;
    if (fcntl(c->socket, F_SETFL, O_ASYNC) < 0)
        child_fail(c, OP_REQUEST, errno);
    int silent = recv(c->socket, &byte, 1, MSG_PEEK | MSG_DONTWAIT) < 0 && errno == EAGAIN;
    if (!c->tell && silent)
        return;
    if (getppid() != c->runner)
        _exit(126); /* it is gone: whoever has taken its place is not to be signalled */
    if (kill(c->runner, SIGIO) < 0)
        child_fail(c, OP_REQUEST, errno);
}

/* Waits for the request and takes it apart, with its descriptors. */
static void take_request(struct command *c)
{
    int fds[MAX_FDS], nfds;
    struct exec_fds places;
    ssize_t got = receive_message(c->socket, request.bytes, sizeof request, fds, &nfds, 0);
    if (got < 0)
        child_fail(c, OP_REQUEST, errno);
    if (got == 0) {
        c->unused = 1; /* the host closed it */
        _exit(125);
    }
    c->at = OP_STDIO;
    const struct exec_msg *h = c->head = &request.exec;
    if (request_type(request.bytes, (size_t)got) != MSG_EXEC)
        child_fail(c, OP_REQUEST, EPROTO);
    /* Sandboxed code will share the other process's ids: no look into it, whatever else allows it. */
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
    c->tell = (h->flags & EXEC_TELL) != 0;
    hand_on_words(c);
    if (exec_decode(h, body, size, strings, &c->body) < 0)
        child_fail(c, OP_REQUEST, EPROTO);
}

/* Runs in the memory of its parent, which sleeps until the exec: system calls only. */
static int child(void *arg)
{
    struct command *c = arg;
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    if (setsid() < 0)
        child_fail(c, OP_PROCESS, errno);
    int null = open("/dev/null", O_RDONLY | O_CLOEXEC); /* ahead: most commands have no other input */
    take_request(c);
    int terminal = -1;
    if ((c->head->flags & EXEC_TTY) && (terminal = give_terminal(c->socket, c->head->rows, c->head->cols)) < 0)
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
    if (c->wait >= 0 && (dup2(c->wait, WAIT_FD) < 0 || dup2(c->slot, SLOT_FD) < 0))
        child_fail(c, OP_STDIO, errno);
    if (terminal >= 0 && ioctl(0, TIOCSCTTY, 0) < 0)
        child_fail(c, OP_TTY, errno);
    for (uint32_t i = 0; i < c->head->rlimits; i++) {
        struct rlimit limit = {.rlim_cur = c->body.rlimits[i].soft, .rlim_max = c->body.rlimits[i].hard};
        if (setrlimit((int)c->body.rlimits[i].resource, &limit) < 0)
            child_fail(c, OP_RLIMIT, errno);
    }
    if (chdir(c->body.cwd) < 0)
        child_fail(c, OP_CHDIR, errno);
    /* All but these is closed by the exec, not before: that is how the other process learns of it. */
    if (syscall(SYS_close_range, 3U, c->wait >= 0 ? WAIT_FD - 1U : ~0U, CLOSE_RANGE_CLOEXEC) < 0 ||
        (c->wait >= 0 && syscall(SYS_close_range, SLOT_FD + 1U, ~0U, CLOSE_RANGE_CLOEXEC) < 0))
        child_fail(c, OP_FDS, errno);
    int denied = 0;
    c->at = OP_EXEC;
    for (char **program = c->body.programs; *program; program++) {
        execve(*program, c->body.argv, c->body.envp);
        if (errno == EACCES)
            denied = 1;
        else if (errno != ENOENT && errno != ENOTDIR)
            child_fail(c, OP_EXEC, errno);
    }
    child_fail(c, OP_EXEC, denied ? EACCES : errno);
}

static _Noreturn void fail(int socket, uint32_t op, int error)
{
    report_failure(socket, op, error);
    _exit(125);
}

/* The whole tree but us. Outside a pid namespace kill(-1) would be everybody. */
static void signal_tree(int signum)
{
    if (getpid() == 1)
        kill(-1, signum);
    else
        kill_children(signum, NULL);
}

/* Whatever loses its parent comes to us: without a child of ours there is nothing left to end. */
static void end_everything(void)
{
    while (waitpid(-1, NULL, WNOHANG) >= 0 || errno != ECHILD) {
        signal_tree(SIGKILL);
        if (waitpid(-1, NULL, 0) < 0 && errno == ECHILD)
            return;
    }
}

static struct command command;
static int begun = -1, life_line = -1;

static int is_running(void)
{
    return !command.failed_op && command.at == OP_EXEC;
}

/* Sleeps until the child has exec'd or ended: then the last writing end of the pipe is closed. */
static void await_exec(void)
{
    char byte;
    if (begun < 0)
        return;
    while (read(begun, &byte, 1) < 0)
        if (errno != EINTR)
            _exit(125);
    close(begun);
    begun = -1;
    struct simple_msg started = {.type = MSG_STARTED, .a = (int32_t)command.pid};
    if (command.tell && is_running() && send_message(command.socket, &started, sizeof started, NULL, 0) < 0) {
        end_everything();
        _exit(125);
    }
}

/* The host has said something, or is gone; or the launcher is. Comes while we sleep in waitpid(), and does by itself what
 * is to be done: so there is nothing that could come between looking and sleeping. Sandboxed code can send this signal
 * too, and makes us look in vain. Until the command runs, its process has our memory: nothing that it uses is written. */
static void on_word(int signum)
{
    (void)signum;
    int fds[MAX_FDS], nfds, error = errno;
    struct pollfd launcher = {.fd = life_line};
    struct simple_msg word;
    ssize_t got;
    /* It fails where sandboxed code has taken our descriptors' limit away; a life line that is cut is seen by others too. */
    if (poll(&launcher, 1, 0) > 0)
        _exit(125);
    if (command.at == OP_REQUEST)
        return;
    await_exec();
    do {
        got = receive_message(command.socket, &word, sizeof word, fds, &nfds, MSG_DONTWAIT);
        for (int i = 0; i < nfds; i++)
            close(fds[i]);
        if (got > 0 && request_type(&word, (size_t)got) == MSG_SIGNAL)
            word.id ? (void)kill(-command.pid, word.a) : signal_tree(word.a);
    } while (got > 0 || (got < 0 && (errno == EMSGSIZE || errno == EMFILE)));
    if (got == 0 || errno != EAGAIN) { /* the host let go: end with everything */
        end_everything();
        _exit(125);
    }
    errno = error;
}

/* The life line is this sandbox's alone where there is one: what is asked for here holds for whoever shares what is open. */
static int ask_for_words(int socket, int life)
{
    struct sigaction action = {.sa_handler = on_word, .sa_flags = SA_RESTART};
    life_line = life;
    if (sigaction(SIGIO, &action, NULL) < 0 || fcntl(socket, F_SETOWN, getpid()) < 0)
        return -1;
    if (life < 0)
        return 0;
    return fcntl(life, F_SETOWN, getpid()) < 0 ? -1 : fcntl(life, F_SETFL, O_ASYNC);
}

static void take_words(int how)
{
    sigset_t mask;
    sigemptyset(&mask);
    sigaddset(&mask, SIGIO);
    sigprocmask(how, &mask, NULL);
}

/* Asleep in waitpid() this process is woken where the command has just ended, not where somebody else is at work. */
static int await_end(pid_t main_child)
{
    int status = 0;
    pid_t pid;
    take_words(SIG_UNBLOCK);
    while ((pid = waitpid(-1, &status, 0)) != main_child)
        if (pid < 0 && errno != EINTR)
            _exit(125);
    take_words(SIG_BLOCK);
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
    sched_yield(); /* the host first, if it was woken here: our own end is long */
    _exit(0);
}

_Noreturn void runner_main(int socket, const struct built *built)
{
    struct command *c = &command;
    int ends[2];
    c->socket = socket;
    c->built = built;
    c->at = OP_REQUEST;
    c->runner = getpid();
    take_words(SIG_BLOCK);
    if (ask_for_words(socket, built->life) < 0 || pipe2(ends, O_CLOEXEC) < 0)
        fail(socket, OP_FDS, errno);
    c->pid = clone(child, child_stack + sizeof child_stack, CLONE_VM | SIGCHLD, c);
    if (c->pid < 0)
        fail(socket, OP_FORK, errno);
    close(ends[1]);
    begun = ends[0];
    for (int i = 0; i < built->nslots; i++)
        close(built->slots[i]);
    int status = await_end(c->pid);
    if (c->unused)
        _exit(0);
    if (c->failed_op)
        fail(socket, c->failed_op, c->error);
    /* Somebody killed it before it was the command: that is not how the command ended. */
    if (c->at != OP_EXEC)
        fail(socket, c->at, ECHILD);
    end_everything();
    report_end(socket, status);
}
