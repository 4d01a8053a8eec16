/* The resident launcher: one per host process, started with an empty environment, ending with its host.
 *
 * Descriptor 0 is the control socket, descriptor 1 a pidfd of the host. Each session attaches a channel of its own; when
 * a channel closes, everything that was started through it is killed. When the host ends, or lets go of the control
 * socket, everything is killed and the launcher ends. */
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

/* `wrapped`: the process is bwrap, whose only child is the first process of the sandbox; `said` is what it wrote to its
 * standard error, `socket` the sandbox's, to pass that on; `life` is our end of its life line. `leaves`: its processes may
 * outlive it and come to us. */
struct child { uint64_t seq; pid_t pid; int channel, said, socket, life; uint32_t id; unsigned char notify, leaves, wrapped; };

static struct child *children;
static size_t nchildren, room;
enum { ORPHANS = 64 }; /* places that are left free for adopted processes */

/* A channel whose processes are being ended: by MSG_KILL_ALL, which is answered when they are gone, or because it was closed.
 * What is left of a closed one has a negative number that no other channel gets. */
struct drain { int channel; uint32_t id; unsigned char again; };
static struct drain *drains;
static size_t ndrains, drain_room;
static int owed; /* an answer could not be sent yet */
static uint64_t made; /* sandboxes, ever */
static struct step steps[MAX_STEPS];
static union { char bytes[MAX_MESSAGE]; struct simple_msg simple; struct prepare_msg prepare; } request;
/* How long our own end waits for that of the sandboxes. */
enum { LAST_LOOK_MS = 20, LAST_S = 5, OWED_MS = 20 };
static int poller, proc, life[2], look_again = -1;

/* A message to a channel must never stop the launcher: a host that does not read loses its notice, not its neighbours. */
static int tell(int channel, uint32_t type, uint32_t id, int32_t a)
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

static uint64_t oldest_of(int channel)
{
    uint64_t oldest = UINT64_MAX;
    for (size_t i = 0; i < nchildren; i++)
        if (children[i].channel == channel && children[i].seq < oldest)
            oldest = children[i].seq;
    return oldest;
}

static int remember(pid_t pid, int channel, const struct prepare_msg *p, int said, int socket, int own_life)
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
    children[nchildren++] = (struct child){.seq = ++made, .pid = pid, .channel = channel, .id = p->id, .said = said,
                                           .socket = socket, .life = own_life,
                                           .notify = (p->flags & PREPARE_NOTIFY) != 0, .wrapped = (unsigned char)wrapped,
                                           .leaves = wrapped || p->clone_flags == 0};
    return 0;
}

/* Why bwrap ended before there was a sandbox, in its own words; the host has no other way to learn it. */
static void pass_on(const struct child *c, int status)
{
    struct { struct simple_msg head; char text[400]; } msg = {.head = {.type = MSG_FAILED, .id = OP_WRAP}};
    ssize_t size = 0;
    int code = WIFEXITED(status) ? WEXITSTATUS(status) : 0;
    if (code != 0 && code < 125) /* from there on it is the end of what bwrap had started */
        size = pread(c->said, msg.text, sizeof msg.text, 0);
    if (size > 0)
        (void)send(c->socket, &msg, sizeof msg.head + (size_t)size, MSG_NOSIGNAL | MSG_DONTWAIT);
    close(c->said);
    close(c->socket);
    close(c->life);
}

/* Without a pid namespace, what a killed runner leaves behind comes to us, one generation at a time. So does the child of a
 * bwrap that was killed just as it had made it. All of it is killed; until it is reaped it counts as its channel's, as far
 * as there is room to list it. */
static void adopt_orphans(int channel, uint64_t seq)
{
    pid_t pids[512];
    if (kill_children(SIGKILL, is_listed) == 0)
        return;
    int n = list_children(pids, (int)(sizeof pids / sizeof *pids));
    for (int i = 0; i < n; i++)
        if (!is_listed(pids[i]) && nchildren < room)
            children[nchildren++] = (struct child){.seq = seq, .pid = pids[i], .channel = channel, .said = -1,
                                                   .socket = -1, .life = -1, .leaves = 1};
}

static void reap(void)
{
    pid_t pid;
    int status;
    while ((pid = waitpid(-1, &status, WNOHANG)) > 0) {
        int orphan = 1, channel = -1;
        uint64_t seq = made;
        leave_network(pid, made);
        for (size_t i = 0; i < nchildren; i++) {
            if (children[i].pid != pid)
                continue;
            struct child was = children[i];
            children[i] = children[--nchildren];
            orphan = was.leaves;
            channel = was.channel;
            seq = was.seq;
            for (size_t k = 0; k < ndrains; k++)
                drains[k].again |= drains[k].channel == channel;
            if (was.wrapped)
                pass_on(&was, status);
            if (was.notify)
                (void)tell(was.channel, MSG_GONE, was.id, status);
            break;
        }
        if (orphan)
            adopt_orphans(channel, seq);
    }
    look_again = forget_networks(is_busy);
}

/* Not reaped yet, so the pid is still its own. The sandbox's first process dies before bwrap, which is left to see it:
 * so the end of bwrap is the end of everything. */
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

/* Answers for the channels whose processes are all gone. When one of a channel's has ended, the others are killed again: a
 * bwrap may have made its child just after the first attempt. A process that cannot be killed, because it waits for a
 * device, delays its own channel only. */
static void settle_drains(void)
{
    owed = 0;
    for (size_t i = 0; i < ndrains;) {
        struct drain d = drains[i];
        if (is_busy(d.channel)) {
            if (d.again)
                kill_channel(d.channel);
            drains[i++].again = 0;
            continue;
        }
        forget_networks_of(d.channel);
        if (d.channel >= 0 && tell(d.channel, MSG_ALL_GONE, d.id, 0) < 0 && errno != EPIPE && errno != ECONNRESET) {
            owed = 1; /* the host does not read now, or there is no memory: sent when it can be */
            i++;
            continue;
        }
        drains[i] = drains[--ndrains];
    }
}

/* Begins to end everything of a channel. */
static void drain_channel(int channel, uint32_t id)
{
    if (ndrains == drain_room) {
        size_t more = drain_room ? drain_room * 2 : 16;
        struct drain *grown = realloc(drains, more * sizeof *grown);
        if (!grown)
            _exit(2); /* everything ends with us: to leave a sandbox alive would be worse */
        drains = grown;
        drain_room = more;
    }
    kill_channel(channel);
    drains[ndrains++] = (struct drain){.channel = channel, .id = id};
    if (channel >= 0 && is_busy(channel))
        (void)tell(channel, MSG_DRAINING, id, 0);
    reap();
    settle_drains();
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

static void close_trees(int n)
{
    for (int i = 0; i < n; i++)
        if (steps[i].op == OP_BIND && steps[i].a[3] >> 32 != 0 && tree_fds[i] >= 0)
            close(tree_fds[i]);
}

/* Descriptors of a request: the sandbox's socket, the plan, cgroup files, what the plan refers to by index, and the
 * namespaces to begin with. */
static void prepare(int channel, const struct prepare_msg *p, int *fds, int nfds)
{
    struct prepare_fds places;
    if (prepare_layout(p, nfds, &places) < 0) {
        if (nfds > 0)
            report_failure(fds[0], OP_PLAN, EPROTO);
        return;
    }
    int socket = fds[0], kept = -1, copies = places.copies, own[2] = {-1, -1};
    uint32_t failed = OP_CLONE;
    struct stat st;
    void *plan = MAP_FAILED;
    struct sandbox s = {.socket = socket, .prepare = p, .steps = steps, .nfds = places.count, .said = -1,
                        .life = life[0], .launchers_end = life[1], .proc = proc};
    memcpy(s.fds, fds + places.first, sizeof(int) * (size_t)s.nfds);
    if (fstat(fds[1], &st) < 0 || (st.st_size > 0 && (plan = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE,
                                                                  fds[1], 0)) == MAP_FAILED)) {
        report_failure(socket, OP_PLAN, errno);
        goto unmap;
    }
    if (st.st_size == 0 || (s.nsteps = plan_decode(plan, (size_t)st.st_size, steps, MAX_STEPS)) < 0 ||
        p->network > (uint32_t)(copies ? s.nsteps : 0)) {
        report_failure(socket, OP_PLAN, EINVAL);
        goto unmap;
    }
    memset(tree_fds, 0xff, sizeof(int) * (size_t)s.nsteps);
    if (open_sources(steps, s.nsteps, s.fds, s.nfds, 1) < 0) {
        report_failure(socket, OP_IDMAP, errno);
        goto trees;
    }
    if (p->flags & PREPARE_WRAPPED) {
        s.said = memfd_create("said", MFD_CLOEXEC);
        kept = fcntl(socket, F_DUPFD_CLOEXEC, 3);
        if (s.said < 0 || kept < 0 || pipe2(own, O_CLOEXEC) < 0) {
            report_failure(socket, OP_FDS, errno);
            goto kept;
        }
        s.life = own[0];
        s.launchers_end = own[1];
    }
    if (pipe2(s.go, O_CLOEXEC) < 0) {
        report_failure(socket, OP_FDS, errno);
        goto kept;
    }
    pid_t pid = copies ? make_copy(&s, channel, fds[nfds - 2], fds[nfds - 1], oldest_of(channel), &failed)
                       : (pid_t)make_owned_child(p->clone_flags, p->uid_out);
    if (pid == 0)
        sandbox_main(&s);
    close(s.go[0]);
    if (pid < 0) {
        report_failure(socket, failed, errno);
    } else {
        failed = 0;
        if (p->flags & PREPARE_REPORT_PID)
            (void)tell(channel, MSG_PID, p->id, pid);
        int listed = remember(pid, channel, p, s.said, kept, own[1]) == 0;
        if (!listed)
            failed = OP_FORK; /* NOLINT(bugprone-branch-clone): each step only if those before it were done */
        else if (!copies && (p->flags & PREPARE_MAP_IDS) && write_ids(pid, p) < 0)
            failed = OP_IDS;
        else if (enter_cgroups(pid, fds + 2, places.cgroups) < 0)
            failed = OP_CGROUP;
        else if (write(s.go[1], "", 1) != 1)
            failed = OP_FORK;
        if (failed) {
            report_failure(socket, failed, errno);
            kill(pid, SIGKILL);
        }
        if (listed)
            s.said = kept = own[1] = -1; /* closed when the child is reaped */
    }
    close(s.go[1]);
kept:
    if (s.said >= 0)
        close(s.said);
    if (kept >= 0)
        close(kept);
    for (int i = 0; i < 2; i++)
        if (own[i] >= 0)
            close(own[i]);
trees:
    close_trees(s.nsteps);
unmap:
    if (plan != MAP_FAILED)
        munmap(plan, (size_t)st.st_size);
}

/* A user namespace that describes an id-mapped mount. */
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

/* A message that did not come whole: what it asked for is not done, and whoever waits for it learns that. */
static void refuse(int *fds, int nfds, int error)
{
    if (nfds > 0)
        report_failure(fds[0], OP_FDS, error);
    for (int i = 0; i < nfds; i++)
        close(fds[i]);
}

static void on_channel(int channel)
{
    int fds[MAX_FDS], nfds;
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
        reap(); /* what has ended may have left a network */
        prepare(channel, &request.prepare, fds, nfds);
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

/* Without this there is nothing to do; the host finds the message when it wonders about our end. */
static _Noreturn void cannot_start(int control)
{
    report_failure(control, OP_PROCESS, errno);
    _exit(2);
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

/* Bounded: a process that cannot be killed ends as soon as it can, without us. */
static void end_all(int signals)
{
    struct timespec now, begun;
    clock_gettime(CLOCK_MONOTONIC, &begun);
    while (clock_gettime(CLOCK_MONOTONIC, &now) == 0 && now.tv_sec - begun.tv_sec < LAST_S &&
           kill_children(SIGKILL, NULL) > 0) {
        struct pollfd ended = {.fd = signals, .events = POLLIN};
        struct signalfd_siginfo info;
        reap();
        poll(&ended, 1, LAST_LOOK_MS);
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
    struct rlimit files;
    sigset_t mask;
    if (getrlimit(RLIMIT_NOFILE, &files) == 0) {
        files.rlim_cur = files.rlim_max;
        setrlimit(RLIMIT_NOFILE, &files);
    }
    /* What the host ignores is not ignored inside. Nothing here sets a handler, so this is for all below. */
    struct sigaction standard = {.sa_handler = SIG_DFL};
    for (int n = 1; n < 32; n++)
        sigaction(n, &standard, NULL); /* refused for SIGKILL and SIGSTOP, which cannot be ignored */
    umask(022);
    prctl(PR_SET_NAME, "sandbox", 0, 0, 0);
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
    setsid(); /* a Ctrl-C at the host's terminal is the host's to handle */
    if (chdir("/") < 0)
        cannot_start(control);
    sigemptyset(&mask);
    /* A sandbox that was killed at its start must not take us along when we tell it to go on. */
    sigaddset(&mask, SIGPIPE);
    sigprocmask(SIG_BLOCK, &mask, NULL);
    sigdelset(&mask, SIGPIPE);
    sigaddset(&mask, SIGCHLD);
    sigprocmask(SIG_BLOCK, &mask, NULL);
    int signals = signalfd(-1, &mask, SFD_CLOEXEC | SFD_NONBLOCK);
    poller = epoll_create1(EPOLL_CLOEXEC);
    proc = open("/proc", O_PATH | O_DIRECTORY | O_CLOEXEC);
    /* Nobody else has the writing end, so the other one tells of our end whatever came of us. */
    if (signals < 0 || poller < 0 || proc < 0 || pipe2(life, O_CLOEXEC) < 0 || watch(control) < 0 || watch(host) < 0 ||
        watch(signals) < 0)
        cannot_start(control);
    for (;;) {
        struct epoll_event events[32];
        int n = epoll_wait(poller, events, 32, owed ? OWED_MS : look_again);
        if (n < 0 && errno != EINTR)
            goto end;
        if (n == 0) {
            look_again = forget_networks(is_busy);
            settle_drains();
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
                settle_drains();
            } else if (fd != control) {
                on_channel(fd);
            }
        }
    }
end:
    end_all(signals);
    return 0;
}
