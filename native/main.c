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
#include <unistd.h>

#include "sbx.h"

struct child { pid_t pid; int channel; uint32_t id; unsigned char notify, bare; };

static struct child *children;
static size_t nchildren, room;
static struct step steps[MAX_STEPS];
static union { char bytes[MAX_MESSAGE]; struct simple_msg simple; struct prepare_msg prepare; } request;
static int poller;

/* A message to a channel must never stop the launcher: a host that does not read loses its notice, not its neighbours. */
static void tell(int channel, uint32_t type, uint32_t id, int32_t a)
{
    struct simple_msg msg = {.type = type, .id = id, .a = a};
    ssize_t sent = send(channel, &msg, sizeof msg, MSG_NOSIGNAL | MSG_DONTWAIT);
    (void)sent;
}

static int is_listed(pid_t pid)
{
    for (size_t i = 0; i < nchildren; i++)
        if (children[i].pid == pid)
            return 1;
    return 0;
}

static int remember(pid_t pid, int channel, const struct prepare_msg *p)
{
    if (nchildren == room) {
        size_t more = room ? room * 2 : 64;
        struct child *grown = realloc(children, more * sizeof *grown);
        if (!grown)
            return -1;
        children = grown;
        room = more;
    }
    children[nchildren++] = (struct child){.pid = pid, .channel = channel, .id = p->id,
                                           .notify = (p->flags & PREPARE_NOTIFY) != 0, .bare = p->clone_flags == 0};
    return 0;
}

static void reap(void)
{
    pid_t pid;
    int status;
    while ((pid = waitpid(-1, &status, WNOHANG)) > 0) {
        int orphan = 1;
        for (size_t i = 0; i < nchildren; i++) {
            if (children[i].pid != pid)
                continue;
            struct child was = children[i];
            children[i] = children[--nchildren];
            orphan = was.bare;
            if (was.notify)
                tell(was.channel, MSG_GONE, was.id, status);
            break;
        }
        /* Without a pid namespace, what a killed runner leaves behind comes to us, one generation at a time. */
        if (orphan)
            kill_children(SIGKILL, is_listed);
    }
}

static int kill_channel(int channel)
{
    int count = 0;
    for (size_t i = 0; i < nchildren; i++)
        if (children[i].channel == channel) {
            kill(children[i].pid, SIGKILL); /* not reaped yet, so the pid is still its own */
            count++;
        }
    return count;
}

/* Ends everything of a channel, and every orphan, and returns when it is gone. */
static void drain_channel(int channel)
{
    while (kill_channel(channel) > 0 || kill_children(SIGKILL, is_listed) > 0) {
        siginfo_t info;
        if (waitid(P_ALL, 0, &info, WEXITED | WNOWAIT) < 0 && errno == ECHILD)
            break;
        reap();
    }
}

static long make_child(uint32_t flags)
{
    struct { uint64_t flags, pidfd, child_tid, parent_tid, exit_signal, stack, stack_size, tls; } args = {
        .flags = flags, .exit_signal = SIGCHLD};
    return syscall(SYS_clone3, &args, sizeof args);
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

/* Descriptors of a request: the sandbox's socket, the plan, cgroup files, then what the plan refers to by index. */
static void prepare(int channel, const struct prepare_msg *p, int *fds, int nfds)
{
    if (nfds < 2 || p->cgroups > (uint32_t)nfds - 2)
        return;
    int socket = fds[0], go[2], first = 2 + (int)p->cgroups;
    struct stat st;
    const char *plan = MAP_FAILED;
    struct sandbox s = {.socket = socket, .prepare = p, .steps = steps, .nfds = nfds - first};
    memcpy(s.fds, fds + first, sizeof(int) * (size_t)s.nfds);
    if (fstat(fds[1], &st) < 0 || st.st_size == 0 ||
        (plan = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fds[1], 0)) == MAP_FAILED ||
        (s.nsteps = plan_decode((const unsigned char *)plan, (size_t)st.st_size, steps, MAX_STEPS)) < 0) {
        report_failure(socket, OP_PLAN, EINVAL);
        goto unmap;
    }
    memset(tree_fds, 0xff, sizeof(int) * (size_t)s.nsteps);
    if (open_sources(steps, s.nsteps, s.fds, s.nfds, 1) < 0) {
        report_failure(socket, OP_IDMAP, errno);
        goto trees;
    }
    if (pipe2(go, O_CLOEXEC) < 0) {
        report_failure(socket, OP_FDS, errno);
        goto trees;
    }
    pid_t pid = (pid_t)make_child(p->clone_flags);
    if (pid == 0) {
        close(go[1]);
        s.go = go[0];
        sandbox_main(&s);
    }
    close(go[0]);
    if (pid < 0) {
        report_failure(socket, OP_CLONE, errno);
    } else {
        uint32_t failed = 0;
        if (p->flags & PREPARE_TELL_PID)
            tell(channel, MSG_PID, p->id, pid);
        if (remember(pid, channel, p) < 0)
            failed = OP_FORK;
        else if ((p->flags & PREPARE_MAP_IDS) && write_ids(pid, p) < 0)
            failed = OP_IDS;
        else if (enter_cgroups(pid, fds + 2, (int)p->cgroups) < 0)
            failed = OP_CGROUP;
        else if (write(go[1], "", 1) != 1)
            failed = OP_FORK;
        if (failed) {
            report_failure(socket, failed, errno);
            kill(pid, SIGKILL);
        }
    }
    close(go[1]);
trees:
    close_trees(s.nsteps);
unmap:
    if (plan != MAP_FAILED)
        munmap((void *)(uintptr_t)plan, (size_t)st.st_size);
}

/* A user namespace that lives only as the descriptor sent back; it describes an id-mapped mount. */
static void send_userns(int control, const struct prepare_msg *p)
{
    int hold[2], fd = -1, status;
    struct simple_msg answer = {.type = MSG_USERNS_READY, .id = p->id, .a = 0};
    if (pipe2(hold, O_CLOEXEC) < 0) {
        answer.a = errno;
    } else {
        pid_t pid = (pid_t)make_child(CLONE_NEWUSER);
        if (pid == 0) {
            char byte;
            close(hold[1]);
            _exit(read(hold[0], &byte, 1) < 0);
        }
        if (pid < 0) {
            answer.a = errno;
        } else {
            if (write_ids(pid, p) < 0 || (fd = open_userns(pid)) < 0)
                answer.a = errno;
        }
        close(hold[0]);
        close(hold[1]);
        if (pid > 0)
            waitpid(pid, &status, 0);
    }
    send_message(control, &answer, sizeof answer, &fd, fd >= 0);
    if (fd >= 0)
        close(fd);
}

static void watch(int fd)
{
    struct epoll_event event = {.events = EPOLLIN, .data.fd = fd};
    epoll_ctl(poller, EPOLL_CTL_ADD, fd, &event);
}

static void on_channel(int channel)
{
    int fds[MAX_FDS], nfds;
    ssize_t got = receive_message(channel, request.bytes, sizeof request, fds, &nfds, MSG_DONTWAIT);
    if (got < 0 && errno == EAGAIN)
        return;
    if (got <= 0) {
        drain_channel(channel);
        close(channel);
        return;
    }
    if (got == (ssize_t)sizeof request.prepare && request.prepare.type == MSG_PREPARE) {
        prepare(channel, &request.prepare, fds, nfds);
    } else if (got == (ssize_t)sizeof request.simple && request.simple.type == MSG_KILL) {
        for (size_t i = 0; i < nchildren; i++)
            if (children[i].channel == channel && children[i].id == request.simple.id) {
                children[i].notify = 1;
                kill(children[i].pid, SIGKILL);
            }
    } else if (got == (ssize_t)sizeof request.simple && request.simple.type == MSG_KILL_ALL) {
        drain_channel(channel);
        tell(channel, MSG_ALL_GONE, request.simple.id, 0);
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
    if (got <= 0)
        return 0;
    if (request.simple.type == MSG_ATTACH && nfds == 1) {
        watch(fds[0]);
        return 1;
    }
    if (request.simple.type == MSG_USERNS && got == (ssize_t)sizeof request.prepare)
        send_userns(control, &request.prepare);
    for (int i = 0; i < nfds; i++)
        close(fds[i]);
    return 1;
}

static int move_up(int fd)
{
    int moved = fcntl(fd, F_DUPFD_CLOEXEC, 3);
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    if (moved < 0 || null < 0 || (null != fd && dup2(null, fd) < 0))
        _exit(2);
    if (null > 2)
        close(null);
    return moved;
}

int main(void)
{
    int control = move_up(0), host = move_up(1);
    struct rlimit files;
    sigset_t mask;
    if (getrlimit(RLIMIT_NOFILE, &files) == 0) {
        files.rlim_cur = files.rlim_max;
        setrlimit(RLIMIT_NOFILE, &files);
    }
    umask(022);
    prctl(PR_SET_NAME, "sandbox", 0, 0, 0);
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
    setsid(); /* a Ctrl-C at the host's terminal is the host's to handle */
    if (chdir("/") < 0)
        return 2;
    sigemptyset(&mask);
    sigaddset(&mask, SIGCHLD);
    sigprocmask(SIG_BLOCK, &mask, NULL);
    int signals = signalfd(-1, &mask, SFD_CLOEXEC | SFD_NONBLOCK);
    poller = epoll_create1(EPOLL_CLOEXEC);
    if (signals < 0 || poller < 0)
        return 2;
    watch(control);
    watch(host);
    watch(signals);
    for (;;) {
        struct epoll_event events[32];
        int n = epoll_wait(poller, events, 32, -1);
        for (int i = 0; i < n; i++) {
            int fd = events[i].data.fd;
            if (fd == host || (fd == control && !on_control(control)))
                goto end;
            if (fd == signals) {
                struct signalfd_siginfo info;
                while (read(signals, &info, sizeof info) > 0)
                    ;
                reap();
            } else if (fd != control) {
                on_channel(fd);
            }
        }
    }
end:
    while (kill_children(SIGKILL, NULL) > 0) {
        siginfo_t info;
        if (waitid(P_ALL, 0, &info, WEXITED | WNOWAIT) < 0 && errno == ECHILD)
            break;
        reap();
    }
    return 0;
}
