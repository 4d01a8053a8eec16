/* One command: its first process, the processes that descend from it, and the report of its end. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "run.h"

enum { MAX_PROCESSES = 16384, ROUNDS = 8, REQUESTS = 4096, ABOVE_STREAMS = 64 };

struct run **runs;
size_t nruns;
static size_t runs_room;
static struct process processes[MAX_PROCESSES];
static pid_t members[MAX_PROCESSES];

void *grow(void *list, size_t n, size_t *room)
{
    if (n < *room)
        return list;
    size_t more = *room ? *room * 2 : 16;
    void *bigger = realloc(list, more * sizeof(void *));
    if (bigger)
        *room = more;
    return bigger;
}

void close_fd(int *fd)
{
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}

void notify(int socket, uint32_t type, uint32_t id, int32_t a)
{
    struct simple_msg msg = {.type = type, .id = id, .a = a};
    if (socket >= 0)
        frame_send(socket, &msg, sizeof msg, MSG_DONTWAIT);
}

static size_t find_members(struct run *r)
{
    size_t n = os_processes(processes, MAX_PROCESSES, r->label);
    return tree_members(&r->tree, processes, n, members, MAX_PROCESSES);
}

/* Signals the whole tree. Returns the number of its processes. */
static size_t signal_tree(struct run *r, int signum)
{
    size_t n = find_members(r);
    for (size_t i = 0; i < n && i < MAX_PROCESSES; i++)
        kill(members[i], signum);
    if (n == 0 && !r->has_exited)
        kill(r->pid, signum); /* too new to have its label */
    return n;
}

void run_kill(struct run *r)
{
    r->is_killed = 1;
    /* A process that is being created is found in the next round. */
    for (int i = 0; i < ROUNDS && signal_tree(r, SIGKILL) > 0; i++)
        ;
}

void run_forget(struct run *r)
{
    close_fd(&r->socket);
    close_fd(&r->status);
    close_fd(&r->wrapper_stderr);
    for (int i = 0; i < r->in.nfds; i++)
        close(r->in.fds[i]);
    free(r->tree.known);
    free(r->in.bytes);
    for (size_t i = 0; i < nruns; i++)
        if (runs[i] == r)
            runs[i] = runs[--nruns];
    free(r);
}

void run_read_progress(struct run *r)
{
    struct progress p;
    ssize_t got = 0;
    while (r->status >= 0 && (got = read(r->status, &p, sizeof p)) == (ssize_t)sizeof p)
        r->progress = p;
    if (r->status < 0 || (got < 0 && errno == EAGAIN))
        return;
    close_fd(&r->status);
    if (r->progress.op == AT_EXEC || r->progress.op == AT_EXEC_REPORT) {
        r->is_started = 1;
        if (r->progress.op == AT_EXEC_REPORT)
            notify(r->socket, MSG_STARTED, 0, (int32_t)r->pid);
    }
}

void run_read_stderr(struct run *r)
{
    char rest[512];
    ssize_t got = 0;
    while (r->wrapper_stderr >= 0 && (got = read(r->wrapper_stderr, rest, sizeof rest)) > 0) {
        size_t room = MAX_STDERR - r->nstderr, n = (size_t)got < room ? (size_t)got : room;
        memcpy(r->stderr_text + r->nstderr, rest, n);
        r->nstderr += n;
    }
    if (r->wrapper_stderr >= 0 && (got == 0 || errno != EAGAIN))
        close_fd(&r->wrapper_stderr);
}

static void report_not_started(struct run *r)
{
    char message[sizeof(struct simple_msg) + MAX_STDERR];
    struct simple_msg failed = {.type = MSG_FAILED, .id = r->progress.op, .a = r->progress.error};
    if (r->progress.op == AT_UNUSED || r->is_killed)
        return; /* the host closed or killed it; the end of its socket is the report */
    if (r->progress.op == 0) {
        failed.id = r->is_wrapped ? OP_WRAP : OP_REQUEST;
        failed.a = r->is_wrapped ? 0 : ECHILD; /* killed by others before it was the command */
    }
    memcpy(message, &failed, sizeof failed);
    memcpy(message + sizeof failed, r->stderr_text, r->nstderr);
    frame_send(r->socket, message, sizeof failed + r->nstderr, MSG_DONTWAIT);
}

static uint64_t microseconds(const struct timeval *t) { return (uint64_t)t->tv_sec * 1000000u + (uint64_t)t->tv_usec; }

static void report(struct run *r)
{
    if (r->socket < 0)
        return;
    if (!r->is_started) {
        report_not_started(r);
        return;
    }
    struct memory_msg memory = {.type = MSG_MEMORY, .exceeded = (uint32_t)r->exceeded, .peak = r->peak};
    if (r->memory)
        frame_send(r->socket, &memory, sizeof memory, MSG_DONTWAIT);
    struct exited_msg msg = {
        .type = MSG_EXITED,
        .status = r->wait_status,
        .user_us = microseconds(&r->used.ru_utime),
        .system_us = microseconds(&r->used.ru_stime),
        .maxrss_kib = os_maxrss_kib(r->used.ru_maxrss),
    };
    frame_send(r->socket, &msg, sizeof msg, MSG_DONTWAIT);
}

int run_reap(struct run *r)
{
    if (!r->has_exited && wait4(r->pid, &r->wait_status, WNOHANG, &r->used) == r->pid)
        r->has_exited = 1;
    if (!r->has_exited)
        return 0;
    /* The command has ended; so do the processes that it left behind, before its end is reported. */
    int rounds = 0;
    while (signal_tree(r, SIGKILL) > 0)
        if (++rounds == ROUNDS)
            return 0; /* the caller tries again soon */
    run_read_progress(r);
    run_read_stderr(r);
    report(r);
    return 1;
}

/* A process that waits for its request must not keep the sockets of others open: their end is a report. */
static void close_others(const struct run *r)
{
    launcher_close_all();
    for (size_t i = 0; i < nruns; i++)
        if (runs[i] != r) {
            close_fd(&runs[i]->socket);
            close_fd(&runs[i]->status);
            close_fd(&runs[i]->wrapper_stderr);
        }
}

static _Noreturn void first_process(struct run *r, int status, int wrapper_stderr, char **args)
{
    close_others(r);
    struct sigaction standard = {.sa_handler = SIG_DFL};
    sigset_t none;
    for (int n = 1; n < 32; n++)
        sigaction(n, &standard, NULL);
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    struct progress failed = {.op = OP_PROCESS};
    if (setsid() < 0 || os_set_label(r->label) < 0) {
        failed.error = errno;
        (void)!write(status, &failed, sizeof failed);
        _exit(EXIT_NOT_EXECUTED);
    }
    if (!args)
        inside(r->socket, status, 0);
    /* Both above the numbers that they are moved to. */
    int socket = fcntl(r->socket, F_DUPFD, ABOVE_STREAMS), progress = fcntl(status, F_DUPFD, ABOVE_STREAMS);
    int null = open("/dev/null", O_RDWR);
    if (socket < 0 || progress < 0 || null < 0 || dup2(null, 0) < 0 || dup2(null, 1) < 0 || dup2(wrapper_stderr, 2) < 0 ||
        dup2(socket, INSIDE_SOCKET) < 0 || dup2(progress, INSIDE_STATUS) < 0)
        _exit(EXIT_NOT_EXECUTED);
    fcntl(socket, F_SETFD, FD_CLOEXEC);
    fcntl(progress, F_SETFD, FD_CLOEXEC);
    if (null > INSIDE_STATUS)
        fcntl(null, F_SETFD, FD_CLOEXEC);
    execv(args[0], args);
    failed.op = OP_WRAP;
    failed.error = errno;
    (void)!write(INSIDE_STATUS, &failed, sizeof failed);
    _exit(EXIT_NOT_EXECUTED);
}

int run_begin(int channel, const struct begin_msg *m, char *label, char **args, int socket)
{
    SCOPED_FD status_in = -1;
    SCOPED_FD stderr_in = -1;
    int status[2] = {-1, -1}, text[2] = {-1, -1};
    struct run **list = grow(runs, nruns, &runs_room);
    if (!list)
        return ENOMEM;
    runs = list;
    struct run *r = calloc(1, sizeof *r);
    if (!r)
        return ENOMEM;
    *r = (struct run){.channel = channel, .id = m->id, .flags = m->flags, .socket = -1, .status = -1, .wrapper_stderr = -1,
                      .memory = m->memory, .processes = m->processes, .is_wrapped = (char)(m->args > 0)};
    memcpy(r->label, label, strlen(label) + 1);
    int error = 0;
    if (os_cloexec_pipe(status) < 0 || (r->is_wrapped && os_cloexec_pipe(text) < 0))
        error = errno;
    r->status = status[0];
    r->wrapper_stderr = text[0];
    status_in = status[1];
    stderr_in = text[1];
    if (!error && (fcntl(r->status, F_SETFL, O_NONBLOCK) < 0 || (r->is_wrapped && fcntl(text[0], F_SETFL, O_NONBLOCK) < 0)))
        error = errno;
    if (!error) {
        r->socket = socket;
        r->pid = fork();
        if (r->pid == 0)
            first_process(r, status_in, stderr_in, r->is_wrapped ? args : NULL);
        if (r->pid < 0)
            error = errno;
    }
    if (error) {
        r->socket = -1; /* stays the caller's */
        run_forget(r);
        return error;
    }
    r->tree.first = r->pid;
    runs[nruns++] = r;
    if (m->flags & PREPARE_REPORT_PID)
        notify(channel, MSG_PID, m->id, (int32_t)r->pid);
    return 0;
}

/* Requests of the host for a command that has started: signals. The end of the socket ends the command. */
void run_read_requests(struct run *r)
{
    int fds[MAX_FDS], nfds, more = -1;
    const void *bytes;
    ssize_t size = 0;
    if (!r->in.bytes) {
        r->in.room = REQUESTS;
        r->in.bytes = malloc(r->in.room);
        errno = ENOMEM;
    }
    while (r->in.bytes && size >= 0 && (more = inbox_fill(&r->in, r->socket)) > 0)
        while ((size = inbox_first(&r->in, &bytes, fds, &nfds)) > 0) {
            struct simple_msg m;
            for (int i = 0; i < nfds; i++)
                close(fds[i]);
            if (request_type(bytes, (size_t)size) == MSG_SIGNAL) {
                memcpy(&m, bytes, sizeof m);
                if (m.id != 0)
                    kill(-r->pid, m.a);
                else
                    signal_tree(r, m.a);
            }
            inbox_drop(&r->in);
        }
    if (more < 0 && errno == EAGAIN && size >= 0)
        return;
    close_fd(&r->socket);
    run_kill(r);
}

/* Memory and number of processes, where the system has no limit for a tree. */
void run_watch(struct run *r)
{
    uint64_t sum = 0;
    if ((!r->memory && !r->processes) || r->has_exited || r->is_killed)
        return;
    size_t n = find_members(r);
    for (size_t i = 0; r->memory && i < n && i < MAX_PROCESSES; i++)
        sum += os_memory(members[i]);
    if (sum > r->peak)
        r->peak = sum;
    if (r->memory && sum > r->memory)
        r->exceeded = 1;
    if (r->exceeded || (r->processes && n > r->processes))
        run_kill(r);
}
