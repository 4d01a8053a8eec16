/* The template's own side: a library that the template's Python has loaded, with the launcher's code in it.
 *
 * For each request a helper enters the mounts and the network of the sandbox and makes its first process there, which is a
 * copy of the template and a child of the launcher. That process performs the plan like every sandbox, and its own child
 * returns from `serve_forks` inside, with everything in place: the template's Python goes on there with the command. */
#ifdef __aarch64__
#undef _FORTIFY_SOURCE /* its longjmp aborts if the jump leads to another stack, which is the point here */
#include <setjmp.h>
#define SET_JUMP(at) _setjmp(at)
#define LONG_JUMP(at) _longjmp(at, 1)
static jmp_buf resume_at;
#else /* without the C library's bookkeeping of shadow stacks, which is of another stack */
#define SET_JUMP(at) __builtin_setjmp(at)
#define LONG_JUMP(at) __builtin_longjmp(at, 1)
static void *resume_at[5];
#endif
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../sbx.h"
#include "template.h"

enum { SIGNALS = 65, MAX_RANGES = 4096, REHEARSAL_S = 5 };
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif

static struct step steps[MAX_STEPS];
static struct prepare_msg request;
static struct sigaction dispositions[SIGNALS];
static char name[16];
static char **environment;
static void *plan = MAP_FAILED;
static size_t plan_size;

static struct seeding {
    struct sandbox sandbox;
    int mounts, netns;
    /* Written by the helper, which shares our memory. */
    volatile pid_t pid;
    volatile int error;
} seeding;

/* Memory that every run of a script uses, from a rehearsal in the template: those that it reads follow those that it writes. */
static struct range ranges[MAX_RANGES];
static size_t nwritten, nranges;
static int rehearsal = -1;

/* Copies these pages while the process waits for its script: one by one, each would interrupt the script. The interpreter of
 * a context lives long, and shares what it does not change. This only saves time: without it, on old kernels, pages are
 * copied when they are used. */
static void populate(void)
{
    struct stat st;
    if (fstat(WAIT_FD, &st) < 0 || S_ISSOCK(st.st_mode))
        return;
    for (size_t i = 0; i < nranges; i++) {
        /* NOLINTNEXTLINE(performance-no-int-to-ptr): an address that the rehearsal reported */
        void *at = (void *)(uintptr_t)ranges[i].at;
        if (madvise(at, ranges[i].size, i < nwritten ? MADV_POPULATE_WRITE : MADV_POPULATE_READ) < 0 && errno == EINVAL)
            return;
    }
}

/* In the process of the command: what an exec resets is set back, and the template's Python continues on its own stack. */
static void go_on(char **envp)
{
    environment = envp;
    munmap(plan, plan_size);
    populate();
    for (int n = 1; n < SIGNALS; n++)
        sigaction(n, &dispositions[n], NULL); /* fails for SIGKILL, SIGSTOP and those of the C library */
    if (prctl(PR_SET_NAME, name, 0, 0, 0) < 0 || prctl(PR_SET_DUMPABLE, 1, 0, 0, 0) < 0)
        _exit(EXIT_NOT_EXECUTED);
    LONG_JUMP(resume_at);
}

/* The first process of the sandbox, still with the memory of the template. */
static _Noreturn void begin(void)
{
    struct sigaction standard = {.sa_handler = SIG_DFL};
    for (int n = 1; n < SIGNALS; n++)
        sigaction(n, &standard, NULL);
    prctl(PR_SET_NAME, "sandbox", 0, 0, 0);
    /* Its files in /proc, where it writes its id maps, belong to it only if it is dumpable. */
    if (prctl(PR_SET_DUMPABLE, 1, 0, 0, 0) < 0 || dup2(0, 1) < 0 || dup2(0, 2) < 0)
        _exit(EXIT_SANDBOX);
    continue_template = go_on;
    sandbox_main(&seeding.sandbox);
}

/* Runs in the memory of the template, which is suspended until this ends: system calls only. */
static int seed(void *arg)
{
    struct seeding *s = arg;
    if (setns(s->mounts, CLONE_NEWNS) == 0 && (s->netns < 0 || setns(s->netns, CLONE_NEWNET) == 0) && limit_all(&request) == 0) {
        s->pid = (pid_t)make_child(request.clone_flags | CLONE_PARENT);
        if (s->pid == 0)
            begin();
    }
    s->error = errno;
    _exit(0);
}

static uint32_t load_plan(int fd)
{
    struct stat st;
    if (fstat(fd, &st) < 0)
        return OP_PLAN;
    plan_size = (size_t)st.st_size;
    if (st.st_size <= 0 || (plan = mmap(NULL, plan_size, PROT_READ, MAP_PRIVATE, fd, 0)) == MAP_FAILED)
        return OP_PLAN;
    int n = plan_decode(plan, plan_size, steps, MAX_STEPS);
    if (n < 0 || request.network > (uint32_t)n) {
        errno = EINVAL;
        return OP_PLAN;
    }
    seeding.sandbox.nsteps = n;
    memset(tree_fds, 0xff, sizeof(int) * (size_t)n);
    return 0;
}

static uint32_t fork_sandbox(int *fds, int nfds, struct forked *reply)
{
    int has_network = request.network != 0, first = FORK_FDS + has_network;
    if (nfds < first || !(request.flags & PREPARE_COPY)) {
        errno = EPROTO;
        return OP_FORK;
    }
    seeding = (struct seeding){.mounts = fds[5], .netns = has_network ? fds[6] : -1, .pid = -1, .error = ECHILD};
    seeding.sandbox = (struct sandbox){.socket = fds[0], .go = {fds[2], -1}, .life = fds[3], .launchers_end = -1, .proc = fds[4],
                                       .bwrap_stderr = -1, .template = -1, .prepare = &request, .steps = steps, .nfds = nfds - first};
    memcpy(seeding.sandbox.fds, fds + first, sizeof(int) * (size_t)(nfds - first));
    uint32_t failed = load_plan(fds[1]);
    if (!failed) {
        static char stack[65536] __attribute__((aligned(16)));
        /* As a child of the launcher, so that its own child is one too. */
        reply->helper = clone(seed, stack + sizeof stack, CLONE_VM | CLONE_FILES | CLONE_VFORK | CLONE_PARENT, &seeding);
        failed = OP_CLONE;
        if (reply->helper > 0) {
            reply->pid = seeding.pid;
            errno = seeding.error;
        }
    }
    int saved = errno;
    if (plan != MAP_FAILED)
        munmap(plan, plan_size);
    plan = MAP_FAILED;
    errno = saved;
    return failed;
}

void serve_forks(int launcher, int host)
{
    for (int n = 1; n < SIGNALS; n++)
        sigaction(n, NULL, &dispositions[n]);
    /* Forks have the same ids, although they cannot see this process. */
    if (prctl(PR_GET_NAME, name, 0, 0, 0) < 0 || prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) < 0)
        _exit(EXIT_SANDBOX);
    if (SET_JUMP(resume_at))
        return;
    for (;;) {
        struct pollfd sockets[] = {{.fd = launcher, .events = POLLIN}, {.fd = host, .events = POLLIN}};
        int fds[MAX_FDS], nfds;
        if (poll(sockets, 2, -1) < 0 && errno != EINTR)
            _exit(EXIT_SANDBOX);
        if (sockets[1].revents)
            _exit(0);
        if (!sockets[0].revents)
            continue;
        if (receive_message(launcher, &request, sizeof request, fds, &nfds, 0) != sizeof request)
            _exit(0);
        struct forked reply = {.pid = -1};
        reply.failed_op = fork_sandbox(fds, nfds, &reply);
        reply.error = errno;
        for (int i = 0; i < nfds; i++)
            close(fds[i]);
        if (send_message(launcher, &reply, sizeof reply, NULL, 0) < 0)
            _exit(0);
    }
}

/* This library was loaded before the modules that the template has imported, so theirs end before. */
__attribute__((destructor)) static void end_rehearsal(void)
{
    if (rehearsal < 0)
        return;
    if (write(rehearsal, "", 1) < 0)
        _exit(EXIT_SANDBOX);
    for (;;)
        pause(); /* the template looks at our memory, and ends us */
}

void rehearse(int fd)
{
    rehearsal = fd;
    if (prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0) < 0 || signal(SIGALRM, SIG_DFL) == SIG_ERR)
        _exit(EXIT_SANDBOX);
    alarm(REHEARSAL_S); /* an exit handler of a module may never return */
}

void set_ranges(const struct range *given, size_t written, size_t all)
{
    if (all > MAX_RANGES || written > all)
        return;
    memcpy(ranges, given, sizeof *given * all);
    nwritten = written;
    nranges = all;
}

char **command_environment(void)
{
    return environment;
}
