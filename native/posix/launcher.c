/* The portable launcher: one per host process, which it ends with.
 *
 * Descriptor 0 is the control socket, and the host is the parent process. Each session attaches a channel; when a channel
 * closes, every command that was started through it is killed. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "run.h"

enum { CONTROL_BYTES = 4096, CHANNEL_BYTES = 256 * 1024, RETRY_MS = 2, WATCH_MS = 30, MAX_OPEN_FILES = 10240, LAST_ROUNDS = 2000 };

struct channel { int fd; struct inbox in; uint32_t drain; char is_draining, is_closed; };

static struct channel **channels;
static size_t nchannels, channels_room;
static struct inbox control_in;
static int control = -1, host = -1, wake[2] = {-1, -1};

void launcher_close_all(void)
{
    close_fd(&control);
    close_fd(&host);
    close_fd(&wake[0]);
    close_fd(&wake[1]);
    for (size_t i = 0; i < nchannels; i++)
        if (!channels[i]->is_closed)
            close(channels[i]->fd);
}

static void on_sigchld(int signum)
{
    (void)signum;
    int error = errno;
    (void)!write(wake[1], "", 1);
    errno = error;
}

static struct channel *channel_of(int fd)
{
    for (size_t i = 0; i < nchannels; i++)
        if (channels[i]->fd == fd && !channels[i]->is_closed)
            return channels[i];
    return NULL;
}

static int is_busy(int channel)
{
    for (size_t i = 0; i < nruns; i++)
        if (runs[i]->channel == channel)
            return 1;
    return 0;
}

static void end_drain(struct channel *c)
{
    if (c->is_draining && !is_busy(c->fd)) {
        c->is_draining = 0;
        notify(c->fd, MSG_ALL_GONE, c->drain, 0);
    }
}

static void reap(void)
{
    for (size_t i = nruns; i-- > 0;) {
        struct run *r = runs[i];
        if (!run_reap(r))
            continue;
        struct channel *c = channel_of(r->channel);
        uint32_t id = r->id, notifies = r->flags & PREPARE_NOTIFY;
        run_forget(r);
        if (c && notifies)
            notify(c->fd, MSG_GONE, id, 0);
        if (c)
            end_drain(c);
    }
}

static void kill_all_of(int channel)
{
    for (size_t i = 0; i < nruns; i++)
        if (runs[i]->channel == channel)
            run_kill(runs[i]);
}

static void close_channel(struct channel *c)
{
    kill_all_of(c->fd);
    for (size_t i = 0; i < nruns; i++)
        if (runs[i]->channel == c->fd)
            runs[i]->channel = -1;
    for (int i = 0; i < c->in.nfds; i++)
        close(c->in.fds[i]);
    close(c->fd);
    c->is_closed = 1;
}

/* Returns an errno. */
static int begin(struct channel *c, const void *bytes, size_t size, int socket, uint32_t *id)
{
    static union { struct begin_msg head; char bytes[CHANNEL_BYTES]; } copy;
    static char *args[MAX_WRAPPER_ARGS + 3];
    char *label;
    memcpy(copy.bytes, bytes, size);
    *id = copy.head.id;
    if (begin_decode(&copy.head, size, copy.bytes + sizeof copy.head, &label, args) < 0)
        return EPROTO;
    if (copy.head.args > 0) {
        args[copy.head.args] = (char *)os_own_path();
        args[copy.head.args + 1] = "inside";
        args[copy.head.args + 2] = NULL;
        if (!args[copy.head.args])
            return ENOENT;
    }
    return run_begin(c->fd, &copy.head, label, args, socket);
}

static void on_request(struct channel *c, const void *bytes, size_t size, int *fds, int nfds)
{
    uint32_t type = 0, id;
    struct simple_msg m;
    int taken = 0;
    memcpy(&type, bytes, size < sizeof type ? size : sizeof type);
    if (size >= sizeof(struct begin_msg) && type == MSG_BEGIN && nfds == 1) {
        int error = begin(c, bytes, size, fds[0], &id);
        taken = !error;
        if (error)
            notify(fds[0], MSG_FAILED, OP_FORK, error);
        notify(c->fd, MSG_BEGUN, id, error);
    } else if (request_type(bytes, size) == MSG_KILL) {
        memcpy(&m, bytes, sizeof m);
        for (size_t i = 0; i < nruns; i++)
            if (runs[i]->channel == c->fd && runs[i]->id == m.id)
                run_kill(runs[i]);
    } else if (request_type(bytes, size) == MSG_KILL_ALL) {
        memcpy(&m, bytes, sizeof m);
        notify(c->fd, MSG_DRAINING, m.id, 0);
        kill_all_of(c->fd);
        c->is_draining = 1;
        c->drain = m.id;
        end_drain(c);
    }
    for (int i = taken; i < nfds; i++)
        close(fds[i]);
}

static void on_channel(struct channel *c)
{
    int fds[MAX_FDS], nfds, more = -1;
    const void *bytes;
    ssize_t size = 0;
    while (size >= 0 && (more = inbox_fill(&c->in, c->fd)) > 0)
        while ((size = inbox_first(&c->in, &bytes, fds, &nfds)) > 0) {
            on_request(c, bytes, (size_t)size, fds, nfds);
            inbox_drop(&c->in);
        }
    if (size < 0 || more >= 0 || errno != EAGAIN)
        close_channel(c);
}

static int add_channel(int fd)
{
    struct channel **list = grow(channels, nchannels, &channels_room);
    if (!list)
        return -1;
    channels = list;
    struct channel *c = calloc(1, sizeof *c);
    if (!c || !(c->in.bytes = malloc(CHANNEL_BYTES))) {
        free(c);
        return -1;
    }
    c->in.room = CHANNEL_BYTES;
    c->fd = fd;
    channels[nchannels++] = c;
    notify(fd, MSG_BEGUN, 0, 0);
    return 0;
}

/* Returns 0 when the host has ended. */
static int on_control(void)
{
    int fds[MAX_FDS], nfds, more = -1;
    const void *bytes;
    ssize_t size = 0;
    while (size >= 0 && (more = inbox_fill(&control_in, control)) > 0)
        while ((size = inbox_first(&control_in, &bytes, fds, &nfds)) > 0) {
            int taken = request_type(bytes, (size_t)size) == MSG_ATTACH && nfds == 1 && add_channel(fds[0]) == 0;
            for (int i = taken; i < nfds; i++)
                close(fds[i]);
            inbox_drop(&control_in);
        }
    return size >= 0 && more < 0 && errno == EAGAIN;
}

static void drop_closed_channels(void)
{
    for (size_t i = nchannels; i-- > 0;)
        if (channels[i]->is_closed) {
            free(channels[i]->in.bytes);
            free(channels[i]);
            channels[i] = channels[--nchannels];
        }
}

static int64_t now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

static void on_run(int fd)
{
    for (size_t i = 0; i < nruns; i++) {
        struct run *r = runs[i];
        if (r->status == fd)
            run_read_progress(r);
        else if (r->wrapper_stderr == fd)
            run_read_stderr(r);
        else if (r->socket == fd && r->is_started)
            run_read_requests(r);
        else
            continue;
        return;
    }
}

/* Returns the descriptors to poll, or NULL without memory; `wait` is the time until the next look at the processes. */
static struct pollfd *to_poll(size_t *n, int *wait)
{
    static struct pollfd *polled;
    struct pollfd *more = realloc(polled, (3 + nchannels + 3 * nruns) * sizeof *polled);
    if (!more)
        return NULL;
    polled = more;
    *n = 0;
    *wait = -1;
    polled[(*n)++] = (struct pollfd){.fd = wake[0], .events = POLLIN};
    polled[(*n)++] = (struct pollfd){.fd = control, .events = POLLIN};
    polled[(*n)++] = (struct pollfd){.fd = host, .events = POLLIN};
    for (size_t i = 0; i < nchannels; i++)
        polled[(*n)++] = (struct pollfd){.fd = channels[i]->fd, .events = POLLIN};
    for (size_t i = 0; i < nruns; i++) {
        struct run *r = runs[i];
        polled[(*n)++] = (struct pollfd){.fd = r->status, .events = POLLIN};
        polled[(*n)++] = (struct pollfd){.fd = r->wrapper_stderr, .events = POLLIN};
        polled[(*n)++] = (struct pollfd){.fd = r->is_started && !r->has_exited ? r->socket : -1, .events = POLLIN};
        if (r->has_exited)
            *wait = RETRY_MS;
        else if ((r->memory || r->processes) && *wait < 0)
            *wait = WATCH_MS;
    }
    return polled;
}

static void serve(void)
{
    int64_t watched = 0;
    for (;;) {
        size_t n;
        int wait;
        struct pollfd *polled = to_poll(&n, &wait);
        if (!polled || (poll(polled, (nfds_t)n, wait) < 0 && errno != EINTR))
            return;
        char rest[64];
        while (read(wake[0], rest, sizeof rest) > 0)
            ;
        size_t first_run = 3 + nchannels;
        if ((polled[1].revents && !on_control()) || polled[2].revents)
            return;
        /* The lists change below, so each owner is found again by its descriptor. */
        for (size_t i = 3; i < n; i++) {
            struct channel *c = i < first_run && polled[i].revents ? channel_of(polled[i].fd) : NULL;
            if (c)
                on_channel(c);
            else if (i >= first_run && polled[i].revents)
                on_run(polled[i].fd);
        }
        reap();
        if (wait >= 0 && now_ms() - watched >= WATCH_MS) {
            for (size_t i = 0; i < nruns; i++)
                run_watch(runs[i]);
            watched = now_ms();
        }
        drop_closed_channels();
    }
}

static int set_up(void)
{
    struct rlimit files;
    struct sigaction child = {.sa_handler = on_sigchld, .sa_flags = SA_RESTART | SA_NOCLDSTOP};
    control = fcntl(0, F_DUPFD_CLOEXEC, 3);
    int null = open("/dev/null", O_RDWR);
    if (control < 0 || null < 0)
        return -1;
    for (int i = 0; i < 3; i++)
        dup2(null, i);
    if (null > 2)
        close(null);
    if (getrlimit(RLIMIT_NOFILE, &files) == 0 && files.rlim_cur < MAX_OPEN_FILES) {
        files.rlim_cur = files.rlim_max < MAX_OPEN_FILES ? files.rlim_max : MAX_OPEN_FILES; /* macOS refuses more */
        setrlimit(RLIMIT_NOFILE, &files);
    }
    umask(022);
    setsid(); /* Ctrl-C at the host's terminal is for the host */
    signal(SIGPIPE, SIG_IGN);
    host = os_watch_host(getppid());
    control_in.room = CONTROL_BYTES;
    control_in.bytes = malloc(control_in.room);
    if (host < 0 || chdir("/") < 0 || os_cloexec_pipe(wake) < 0 || !control_in.bytes)
        return -1;
    fcntl(wake[0], F_SETFL, O_NONBLOCK);
    fcntl(wake[1], F_SETFL, O_NONBLOCK);
    return sigaction(SIGCHLD, &child, NULL);
}

int main(int argc, char **argv)
{
    if (argc > 1 && strcmp(argv[1], "inside") == 0)
        inside(INSIDE_SOCKET, INSIDE_STATUS, 1);
    if (set_up() < 0)
        return EXIT_LAUNCHER;
    serve();
    for (int round = 0; nruns > 0 && round < LAST_ROUNDS; round++) {
        for (size_t i = 0; i < nruns; i++)
            run_kill(runs[i]);
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
        reap();
    }
    return 0;
}
