/* The resident launcher: one per host process, started with an empty environment, ending with its host.
 *
 * Descriptor 0 is the control socket, descriptor 1 a pidfd of the host. Each session attaches a channel of its own; when
 * a channel closes, everything that was started through it is killed. When the host ends, or closes the control socket,
 * everything is killed and the launcher ends. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "sbx.h"

/* `wrapped`: the process is bwrap, whose only child is the first process of the sandbox; `bwrap_stderr` is a file with its
 * error output, `socket` is the sandbox's, to report that output; `life` is our end of its life pipe. `leaves`: its
 * processes may outlive it and be reparented to us. `template`: our socket to a template, else -1. `joined`: it is the
 * runner of a command in a machine; if it is killed, the command's own process is reparented to us. */
struct child {
    uint64_t seq;
    pid_t pid;
    int channel, bwrap_stderr, socket, life, template;
    uint32_t id;
    unsigned char notify, leaves, wrapped, joined;
};

static struct child *children;
static size_t nchildren, room;
enum { ORPHANS = 64 }; /* entries that are kept free for adopted processes */

/* A channel whose processes are being ended: by MSG_KILL_ALL, which is answered when they are gone, or because it was closed.
 * The processes of a closed channel get a negative channel number that is never reused. */
struct drain { int channel; uint32_t id; unsigned char again; };
static struct drain *drains;
static size_t ndrains, drain_room;
static int reply_pending; /* a reply could not be sent yet */
static uint64_t sandbox_count; /* ever made */
static struct step steps[MAX_STEPS];
static union { char bytes[MAX_MESSAGE]; struct simple_msg simple; struct prepare_msg prepare; } request;
/* How long the launcher waits for the end of its sandboxes before it ends itself. */
enum { FINAL_POLL_MS = 20, FINAL_WAIT_S = 5, RETRY_MS = 20 };
static int poller, proc, life[2], next_check_ms = -1;

/* A message to a channel must never block the launcher: a session that does not read loses the message, and no other
 * session waits for it. */
static int notify(int channel, uint32_t type, uint32_t id, int32_t a)
{
    struct simple_msg msg = {.type = type, .id = id, .a = a};
    return send(channel, &msg, sizeof msg, MSG_NOSIGNAL | MSG_DONTWAIT) < 0 ? -1 : 0;
}

static int is_listed(pid_t pid)
{
    for (size_t i = 0; i < nchildren; i++)
        if (children[i].pid == pid)
            return 1;
    return 0;
}

static int is_busy(int channel)
{
    for (size_t i = 0; i < nchildren; i++)
        if (children[i].channel == channel)
            return 1;
    return 0;
}

static int template_of(int channel, uint32_t id)
{
    for (size_t i = 0; i < nchildren; i++)
        if (children[i].channel == channel && children[i].id == id && children[i].template >= 0)
            return children[i].template;
    errno = ESRCH;
    return -1;
}

/* The number of the oldest living sandbox; with `joined`, of those in a machine, whose first process is not one of them. */
static uint64_t oldest_of(int channel, int joined)
{
    uint64_t oldest = UINT64_MAX;
    for (size_t i = 0; i < nchildren; i++)
        if (children[i].channel == channel && children[i].template < 0 && children[i].joined >= joined &&
            children[i].seq < oldest)
            oldest = children[i].seq;
    return oldest;
}

/* A template holds nothing of a sandbox. */
static int has_sandbox(int channel)
{
    return oldest_of(channel, 0) != UINT64_MAX;
}

static int remember(pid_t pid, int channel, const struct prepare_msg *p, int bwrap_stderr, int socket, int own_life, int template)
{
    if (nchildren + ORPHANS >= room) {
        size_t more = room ? room * 2 : (size_t)4 * ORPHANS;
        struct child *grown = realloc(children, more * sizeof *grown);
        if (!grown)
            return -1;
        children = grown;
        room = more;
    }
    int wrapped = (p->flags & PREPARE_WRAPPED) != 0;
    children[nchildren++] = (struct child){.seq = ++sandbox_count, .pid = pid, .channel = channel, .id = p->id,
                                           .bwrap_stderr = bwrap_stderr,
                                           .socket = socket, .life = own_life, .template = template,
                                           .notify = (p->flags & PREPARE_NOTIFY) != 0, .wrapped = (unsigned char)wrapped,
                                           .leaves = wrapped || p->clone_flags == 0,
                                           .joined = (p->flags & PREPARE_JOIN) != 0};
    return 0;
}

/* Reports the error output of a bwrap that ended before there was a sandbox; it explains the failure. */
static void report_bwrap_failure(const struct child *c, int status)
{
    struct { struct simple_msg head; char text[400]; } msg = {.head = {.type = MSG_FAILED, .id = OP_WRAP}};
    ssize_t size = 0;
    int code = WIFEXITED(status) ? WEXITSTATUS(status) : 0;
    if (code != 0 && code < EXIT_SANDBOX) /* from there on it is the exit code of the process that bwrap started */
        size = pread(c->bwrap_stderr, msg.text, sizeof msg.text, 0);
    if (size > 0)
        (void)send(c->socket, &msg, sizeof msg.head + (size_t)size, MSG_NOSIGNAL | MSG_DONTWAIT);
    close(c->bwrap_stderr);
    close(c->socket);
    close(c->life);
}

/* Without a pid namespace, the orphans of a killed runner are reparented to us, one generation at a time. So is the child of
 * a bwrap that was killed just after it had made it. All of them are killed; until they are reaped they count for their
 * channel, as far as there is room to list them. */
static void adopt_orphans(int channel, uint64_t seq)
{
    pid_t pids[512];
    if (kill_children(SIGKILL, is_listed) == 0)
        return;
    int n = list_children(pids, (int)(sizeof pids / sizeof *pids));
    for (int i = 0; i < n; i++)
        if (!is_listed(pids[i]) && nchildren < room)
            children[nchildren++] = (struct child){.seq = seq, .pid = pids[i], .channel = channel, .bwrap_stderr = -1,
                                                   .socket = -1, .life = -1, .template = -1, .leaves = 1};
}

static void reap(void)
{
    pid_t pid;
    int status;
    while ((pid = waitpid(-1, &status, WNOHANG)) > 0) {
        int orphan = 1, channel = -1;
        uint64_t seq = sandbox_count;
        leave_network(pid, sandbox_count);
        for (size_t i = 0; i < nchildren; i++) {
            if (children[i].pid != pid)
                continue;
            struct child was = children[i];
            children[i] = children[--nchildren];
            orphan = was.leaves || (was.joined && status != 0);
            channel = was.channel;
            seq = was.seq;
            for (size_t k = 0; k < ndrains; k++)
                drains[k].again |= drains[k].channel == channel;
            if (was.wrapped)
                report_bwrap_failure(&was, status);
            close_scoped(&was.template);
            if (was.notify)
                (void)notify(was.channel, MSG_GONE, was.id, status);
            break;
        }
        if (orphan)
            adopt_orphans(channel, seq);
    }
    next_check_ms = forget_networks(has_sandbox);
}

/* The child is not reaped yet, so its pid is valid. The sandbox's first process is killed before bwrap, which then ends by
 * itself: so the end of bwrap is the end of the whole sandbox. */
static void end_child(const struct child *c)
{
    if (!c->wrapped || !kill_only_child(c->pid))
        kill(c->pid, SIGKILL);
}

static void kill_channel(int channel)
{
    for (size_t i = 0; i < nchildren; i++)
        if (children[i].channel == channel)
            end_child(&children[i]);
}

/* Replies to the channels whose processes are all gone. When one process of a channel has ended, the others are killed
 * again: a bwrap may have made its child just after the first attempt. A process that cannot be killed, because it waits
 * for a device, delays only its own channel. */
static void finish_drains(void)
{
    reply_pending = 0;
    for (size_t i = 0; i < ndrains;) {
        struct drain d = drains[i];
        if (is_busy(d.channel)) {
            if (d.again)
                kill_channel(d.channel);
            drains[i++].again = 0;
            continue;
        }
        forget_networks_of(d.channel);
        if (d.channel >= 0 && notify(d.channel, MSG_ALL_GONE, d.id, 0) < 0 && errno != EPIPE && errno != ECONNRESET) {
            reply_pending = 1; /* the host does not read now, or there is no memory: sent again later */
            i++;
            continue;
        }
        drains[i] = drains[--ndrains];
    }
}

/* Begins to end all processes of a channel. */
static void drain_channel(int channel, uint32_t id)
{
    if (ndrains == drain_room) {
        size_t more = drain_room ? drain_room * 2 : 16;
        struct drain *grown = realloc(drains, more * sizeof *grown);
        if (!grown)
            _exit(EXIT_LAUNCHER); /* this ends everything: leaving a sandbox alive would be worse */
        drains = grown;
        drain_room = more;
    }
    kill_channel(channel);
    drains[ndrains++] = (struct drain){.channel = channel, .id = id};
    if (channel >= 0 && is_busy(channel))
        (void)notify(channel, MSG_DRAINING, id, 0);
    reap();
    finish_drains();
}

static void close_channel(int channel)
{
    static int last_number = -1;
    int number = --last_number;
    for (size_t i = 0; i < nchildren; i++)
        if (children[i].channel == channel) {
            children[i].channel = number;
            children[i].notify = 0;
        }
    for (size_t i = 0; i < ndrains;)
        if (drains[i].channel == channel)
            drains[i] = drains[--ndrains];
        else
            i++;
    forget_networks_of(channel);
    close(channel);
    drain_channel(number, 0);
}

static int enter_cgroups(pid_t pid, const int *fds, int n)
{
    char text[16];
    int at = (int)sizeof text;
    for (int rest = pid; rest > 0; rest /= 10)
        text[--at] = (char)('0' + rest % 10);
    for (int i = 0; i < n; i++)
        if (write(fds[i], text + at, sizeof text - (size_t)at) < 0)
            return -1;
    return 0;
}

/* The plan of one request, mapped and decoded, with the id-mapped trees that were opened for it; released at scope end. */
struct loaded_plan { void *bytes; size_t size; int nsteps; };

static void unload_plan(const struct loaded_plan *plan)
{
    int saved = errno;
    for (int i = 0; i < plan->nsteps; i++)
        if (steps[i].op == OP_BIND && steps[i].a[3] >> 32 != 0 && tree_fds[i] >= 0)
            close(tree_fds[i]);
    if (plan->bytes != MAP_FAILED)
        munmap(plan->bytes, plan->size);
    errno = saved;
}

/* Returns 0, or the operation that failed, with errno. */
static uint32_t load_plan(int fd, const struct prepare_msg *p, const struct sandbox *s, struct loaded_plan *plan)
{
    struct stat st;
    if (fstat(fd, &st) < 0)
        return OP_PLAN;
    plan->size = (size_t)st.st_size;
    if (st.st_size > 0 && (plan->bytes = mmap(NULL, plan->size, PROT_READ, MAP_PRIVATE, fd, 0)) == MAP_FAILED)
        return OP_PLAN;
    int nsteps = st.st_size > 0 ? plan_decode(plan->bytes, plan->size, steps, MAX_STEPS) : -1;
    if (nsteps < 0 || p->network > (uint32_t)((p->flags & PREPARE_COPY) != 0 ? nsteps : 0)) {
        errno = EINVAL;
        return OP_PLAN;
    }
    memset(tree_fds, 0xff, sizeof(int) * (size_t)nsteps);
    plan->nsteps = nsteps;
    return open_sources(steps, nsteps, s->fds, s->nfds, 1) < 0 ? OP_IDMAP : 0;
}

/* Descriptors for a sandbox that bwrap builds: its error output, a copy of its socket, and a life pipe of its own. */
struct wrap_fds { int bwrap_stderr, socket, life[2]; };

static void close_wrap_fds(const struct wrap_fds *w)
{
    close_scoped(&w->bwrap_stderr);
    close_scoped(&w->socket);
    close_scoped(&w->life[0]);
    close_scoped(&w->life[1]);
}

static int open_wrap_fds(struct wrap_fds *w, int socket)
{
    int ends[2];
    w->bwrap_stderr = memfd_create("bwrap-stderr", MFD_CLOEXEC);
    w->socket = fcntl(socket, F_DUPFD_CLOEXEC, 3);
    if (w->bwrap_stderr < 0 || w->socket < 0 || pipe2(ends, O_CLOEXEC) < 0)
        return -1;
    w->life[0] = ends[0];
    w->life[1] = ends[1];
    return 0;
}

/* Completes a cloned child: its id maps, its cgroups, and the byte that it waits for. Returns 0, or the operation that
 * failed, with errno. */
static uint32_t release_child(pid_t pid, const struct prepare_msg *p, const int *cgroups, int ncgroups, int go)
{
    if (!(p->flags & PREPARE_COPY) && (p->clone_flags & CLONE_NEWUSER) && (p->flags & PREPARE_MAP_IDS) && write_ids(pid, p) < 0)
        return OP_IDS;
    if (enter_cgroups(pid, cgroups, ncgroups) < 0)
        return OP_CGROUP;
    return write(go, "", 1) == 1 ? 0 : OP_FORK;
}

/* Descriptors of a request: the sandbox's socket, the plan, cgroup files, those that the plan refers to by index, and the
 * namespaces to begin with. Returns 0, or the operation that failed, with errno. */
static uint32_t prepare(int channel, const struct prepare_msg *p, int *fds, int nfds)
{
    struct prepare_fds places;
    if (prepare_layout(p, nfds, &places) < 0) {
        errno = EPROTO;
        return OP_PLAN;
    }
    struct sandbox s = {.socket = fds[0], .plan = fds[1], .prepare = p, .steps = steps, .nfds = places.count, .bwrap_stderr = -1,
                        .life = life[0], .launchers_end = life[1], .proc = proc, .template = -1};
    memcpy(s.fds, fds + places.first, sizeof(int) * (size_t)s.nfds);
    struct loaded_plan plan __attribute__((cleanup(unload_plan))) = {.bytes = MAP_FAILED};
    uint32_t failed = load_plan(fds[1], p, &s, &plan);
    if (failed)
        return failed;
    s.nsteps = plan.nsteps;
    struct wrap_fds own __attribute__((cleanup(close_wrap_fds))) = {-1, -1, {-1, -1}};
    if (p->flags & PREPARE_WRAPPED) {
        if (open_wrap_fds(&own, fds[0]) < 0)
            return OP_FDS;
        s.bwrap_stderr = own.bwrap_stderr;
        s.life = own.life[0];
        s.launchers_end = own.life[1];
    }
    int ends[2] = {-1, -1};
    if ((p->flags & PREPARE_TEMPLATE) && socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) < 0)
        return OP_FDS;
    SCOPED_FD to_template = ends[0];
    SCOPED_FD of_template = ends[1];
    if ((p->flags & PREPARE_FORK) && (s.template = template_of(channel, p->template)) < 0)
        return OP_TEMPLATE;
    if (p->flags & PREPARE_TEMPLATE)
        s.template = of_template;
    if (pipe2(s.go, O_CLOEXEC) < 0)
        return OP_FDS;
    SCOPED_FD go_read = s.go[0];
    SCOPED_FD go_write = s.go[1];
    failed = OP_CLONE;
    const int *namespaces = fds + nfds - places.copies;
    s.pids = places.copies == NJOINED ? namespaces[JOIN_PID] : -1;
    pid_t pid = places.copies ? make_copy(&s, channel, namespaces, oldest_of(channel, s.pids >= 0), &failed)
                              : (pid_t)make_owned_child(p->clone_flags, p->uid_out);
    if (pid == 0)
        sandbox_main(&s);
    if (pid < 0)
        return failed;
    close(take_fd(&go_read));
    if (p->flags & PREPARE_REPORT_PID)
        (void)notify(channel, MSG_PID, p->id, pid);
    if (remember(pid, channel, p, own.bwrap_stderr, own.socket, own.life[1], to_template) < 0) {
        failed = OP_FORK;
    } else {
        /* From here on these are closed when the child is reaped. */
        (void)take_fd(&own.bwrap_stderr);
        (void)take_fd(&own.socket);
        (void)take_fd(&own.life[1]);
        (void)take_fd(&to_template);
        failed = release_child(pid, p, fds + 2, places.cgroups, go_write);
    }
    if (failed) {
        int error = errno;
        report_failure(fds[0], failed, error); /* before the child's end can be noticed */
        kill(pid, SIGKILL);
    }
    return 0;
}

/* Sends a user namespace that defines the ids of an id-mapped mount. */
static void send_userns(int control, const struct prepare_msg *p)
{
    int fd = make_userns(p);
    struct simple_msg answer = {.type = MSG_USERNS_READY, .id = p->id, .a = fd < 0 ? errno : 0};
    send_message(control, &answer, sizeof answer, &fd, fd >= 0);
    if (fd >= 0)
        close(fd);
}

static int watch(int fd)
{
    struct epoll_event event = {.events = EPOLLIN, .data.fd = fd};
    return epoll_ctl(poller, EPOLL_CTL_ADD, fd, &event);
}

static void on_channel(int channel)
{
    int fds[MAX_FDS], nfds;
    uint32_t failed;
    pid_t first = 0;
    ssize_t got = receive_message(channel, request.bytes, sizeof request, fds, &nfds, MSG_DONTWAIT);
    if (got < 0 && errno == EAGAIN)
        return;
    if (got < 0 && (errno == EMSGSIZE || errno == EMFILE)) {
        refuse(fds, nfds, errno);
        return;
    }
    if (got <= 0) {
        close_channel(channel);
        return;
    }
    switch (request_type(request.bytes, (size_t)got)) {
    case MSG_PREPARE:
        reap(); /* an ended sandbox may have left a reusable network namespace */
        failed = prepare(channel, &request.prepare, fds, nfds);
        if (failed && nfds > 0)
            report_failure(fds[0], failed, errno);
        break;
    case MSG_KILL:
        for (size_t i = 0; i < nchildren; i++)
            if (children[i].channel == channel && children[i].id == request.simple.id) {
                children[i].notify = 1;
                end_child(&children[i]);
            }
        break;
    case MSG_KILL_ALL:
        drain_channel(channel, request.simple.id);
        break;
    case MSG_LOCATE:
        for (size_t i = 0; i < nchildren; i++)
            if (children[i].channel == channel && children[i].id == request.simple.id)
                first = children[i].pid;
        (void)notify(channel, MSG_PID, request.simple.id, first);
        break;
    default: break;
    }
    for (int i = 0; i < nfds; i++)
        close(fds[i]);
}

/* Returns 0 when the host is gone. */
static int on_control(int control)
{
    int fds[MAX_FDS], nfds;
    ssize_t got = receive_message(control, request.bytes, sizeof request, fds, &nfds, MSG_DONTWAIT);
    if (got < 0 && errno == EAGAIN)
        return 1;
    if (got < 0 && (errno == EMSGSIZE || errno == EMFILE)) {
        refuse(fds, nfds, errno);
        return 1;
    }
    if (got <= 0)
        return 0;
    uint32_t type = request_type(request.bytes, (size_t)got);
    if (type == MSG_ATTACH && nfds == 1) {
        if (watch(fds[0]) == 0)
            return 1;
        refuse(fds, nfds, errno);
        return 1;
    }
    if (type == MSG_USERNS)
        send_userns(control, &request.prepare);
    for (int i = 0; i < nfds; i++)
        close(fds[i]);
    return 1;
}

/* The launcher cannot work; the host reads the message when it notices our end. */
static _Noreturn void cannot_start(int control)
{
    report_failure(control, OP_PROCESS, errno);
    _exit(EXIT_LAUNCHER);
}

static int move_up(int fd)
{
    int moved = fcntl(fd, F_DUPFD_CLOEXEC, 3);
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    if (moved < 0 || null < 0 || (null != fd && dup2(null, fd) < 0))
        cannot_start(moved < 0 ? 0 : moved);
    if (null > 2)
        close(null);
    return moved;
}

/* The wait is bounded: a process that cannot be killed now ends as soon as it can, without the launcher. */
static void end_all(int signals)
{
    struct timespec now, begun;
    clock_gettime(CLOCK_MONOTONIC, &begun);
    while (clock_gettime(CLOCK_MONOTONIC, &now) == 0 && now.tv_sec - begun.tv_sec < FINAL_WAIT_S &&
           kill_children(SIGKILL, NULL) > 0) {
        struct pollfd ended = {.fd = signals, .events = POLLIN};
        struct signalfd_siginfo info;
        reap();
        poll(&ended, 1, FINAL_POLL_MS);
        while (read(signals, &info, sizeof info) > 0)
            ;
        reap();
    }
}

int main(int argc, char **argv)
{
    (void)argv;
    if (argc > 1)
        inside_main();
    int control = move_up(0), host = move_up(1);
    failure_socket = control;
    struct rlimit files;
    sigset_t mask;
    if (getrlimit(RLIMIT_NOFILE, &files) == 0) {
        files.rlim_cur = files.rlim_max;
        setrlimit(RLIMIT_NOFILE, &files);
    }
    /* Signals that the host ignores are not ignored inside. The launcher sets no handler, so all descendants inherit this. */
    struct sigaction standard = {.sa_handler = SIG_DFL};
    for (int n = 1; n < 32; n++)
        sigaction(n, &standard, NULL); /* fails for SIGKILL and SIGSTOP, which cannot be ignored */
    umask(022);
    prctl(PR_SET_NAME, "sandbox", 0, 0, 0);
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
    setsid(); /* a Ctrl-C at the host's terminal is for the host alone */
    if (chdir("/") < 0)
        cannot_start(control);
    sigemptyset(&mask);
    /* Writing to a sandbox that was killed at its start must not kill the launcher. */
    sigaddset(&mask, SIGPIPE);
    sigprocmask(SIG_BLOCK, &mask, NULL);
    sigdelset(&mask, SIGPIPE);
    sigaddset(&mask, SIGCHLD);
    sigprocmask(SIG_BLOCK, &mask, NULL);
    int signals = signalfd(-1, &mask, SFD_CLOEXEC | SFD_NONBLOCK);
    poller = epoll_create1(EPOLL_CLOEXEC);
    proc = open("/proc", O_PATH | O_DIRECTORY | O_CLOEXEC);
    /* No other process has the writing end, so the reading end shows our end, whatever its cause. */
    if (signals < 0 || poller < 0 || proc < 0 || pipe2(life, O_CLOEXEC) < 0 || watch(control) < 0 || watch(host) < 0 ||
        watch(signals) < 0)
        cannot_start(control);
    for (;;) {
        struct epoll_event events[32];
        int n = epoll_wait(poller, events, 32, reply_pending ? RETRY_MS : next_check_ms);
        if (n < 0 && errno != EINTR)
            goto end;
        if (n == 0) {
            next_check_ms = forget_networks(has_sandbox);
            finish_drains();
        }
        for (int i = 0; i < n; i++) {
            int fd = events[i].data.fd;
            if (fd == host || (fd == control && !on_control(control)))
                goto end;
            if (fd == signals) {
                struct signalfd_siginfo info;
                while (read(signals, &info, sizeof info) > 0)
                    ;
                reap();
                finish_drains();
            } else if (fd != control) {
                on_channel(fd);
            }
        }
    }
end:
    end_all(signals);
    return 0;
}
