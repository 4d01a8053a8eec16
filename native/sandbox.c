/* The first process of a sandbox, from its clone until it is ready for a command. */
#include <errno.h>
#include <grp.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "sbx.h"

static _Noreturn void fail(int socket, uint32_t op)
{
    report_failure(socket, op, errno);
    _exit(EXIT_SANDBOX);
}

int drop_groups(const struct prepare_msg *p)
{
    return (p->flags & PREPARE_MAP_IDS) && !(p->flags & PREPARE_DENY_SETGROUPS) ? setgroups(0, NULL) : 0;
}

int set_ids(const struct prepare_msg *p)
{
    if (!(p->flags & PREPARE_MAP_IDS))
        return 0;
    return setresgid(p->gid_in, p->gid_in, p->gid_in) < 0 ? -1 : setresuid(p->uid_in, p->uid_in, p->uid_in);
}

_Noreturn void sandbox_main(struct sandbox *s)
{
    static struct built built = {.life = -1, .notify = -1};
    char byte;
    uint32_t failed_op = 0;
    failure_socket = s->socket;
    caller_proc = s->proc;
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);

    /* Wait until the launcher has written the id maps and the cgroups. */
    close(s->go[1]);
    close(s->launchers_end);
    ssize_t got = read(s->go[0], &byte, 1);
    if (got == 0)
        _exit(EXIT_SANDBOX); /* the launcher failed, and has reported it */
    if (got < 0 || setsid() < 0)
        fail(s->socket, OP_PROCESS);
    const struct step *last = s->nsteps > 0 ? &s->steps[s->nsteps - 1] : NULL;
    int wrapped = last && last->op == OP_WRAP, starts = last && last->op == OP_TEMPLATE;
    if (wrapped && find_program(s, last) < 0)
        fail(s->socket, OP_WRAP);
    if (s->prepare->flags & PREPARE_COPY) {
        int maps = (s->prepare->clone_flags & CLONE_NEWUSER) != 0; /* a template has the ids of the shared namespace */
        if ((s->prepare->flags & PREPARE_JOIN) && join_machine(s, &built.label) < 0)
            fail(s->socket, OP_COPY);
        if ((maps && write_own_ids(s->proc, s->prepare) < 0) || open_sources(s->steps, s->nsteps, s->fds, s->nfds, 0) < 0)
            fail(s->socket, OP_COPY);
    } else {
        /* Before the ids change: sources may lie below directories that only the caller can enter. */
        if (s->prepare->clone_flags & CLONE_NEWNS) {
            if (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0)
                fail(s->socket, OP_PRIVATE);
            if (open_sources(s->steps, s->nsteps, s->fds, s->nfds, 0) < 0)
                fail(s->socket, OP_BIND | 0xffffU << 8);
        }
        if (drop_groups(s->prepare) < 0 || set_ids(s->prepare) < 0)
            fail(s->socket, OP_IDS);
    }
    int own = 0; /* the number of steps before those of the command's process, if there are any */
    while (s->steps && own < s->nsteps - wrapped - starts && s->steps[own].op != OP_CONFINE)
        own++;
    if (perform_steps(s->steps, (int)s->prepare->network, own, &built, &failed_op) < 0)
        fail(s->socket, failed_op);
    if (own < s->nsteps - wrapped - starts)
        confined_main(s->socket, &built, s->life, s->steps, own + 1, s->nsteps);
    if (wrapped)
        wrap(s, last);
    if (starts)
        start_template(s, last);
    /* A copy of a verified sandbox reports only failures. */
    int silent = (s->prepare->flags & (PREPARE_COPY | PREPARE_REPORT_PID)) == PREPARE_COPY && !built.label;
    sandbox_ready(s->socket, &built, s->life, !silent);
}

/* Reports that the sandbox is ready, if requested or if there are listening sockets to send. */
_Noreturn void sandbox_ready(int socket, const struct built *built, int life, int report)
{
    /* Changing ids clears the parent-death signal, so it is set now; a launcher that died before has closed its life pipe.
     * The signal is reliable because the launcher has a single thread. Changing ids also hides this process from an
     * unprivileged host, which inspects it before it is used. */
    struct pollfd launcher = {.fd = life};
    if (prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0) < 0 || prctl(PR_SET_DUMPABLE, 1, 0, 0, 0) < 0 || poll(&launcher, 1, 0) < 0)
        fail(socket, OP_PROCESS);
    if (launcher.revents)
        _exit(EXIT_SANDBOX);

    if (built->nshared) {
        struct simple_msg shared = {.type = MSG_SHARED};
        int sent = send_message(socket, &shared, sizeof shared, built->shared, built->nshared);
        if (built->nshared > NJOINED && sent >= 0)
            machine_main(socket);
        _exit(sent < 0 ? EXIT_SANDBOX : 0);
    }
    int keep[2 + MAX_SLOTS + MAX_LISTENERS], n = 0;
    keep[n++] = socket;
    if (built->life >= 0)
        keep[n++] = built->life;
    for (int i = 0; i < built->nslots; i++)
        keep[n++] = built->slots[i];
    for (int i = 0; i < built->nlisteners; i++)
        keep[n++] = built->listeners[i];
    if (close_all_but(keep, n) < 0)
        fail(socket, OP_FDS);
    /* Not every /proc shows no_new_privs. */
    struct simple_msg ready = {.type = MSG_READY, .id = built->label, .a = (int32_t)getpid()};
    if (report && (ready.b = prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0)) < 0)
        fail(socket, OP_PROCESS);
    if ((report || built->nlisteners) && send_message(socket, &ready, sizeof ready, built->listeners, built->nlisteners) < 0)
        _exit(EXIT_SANDBOX);
    for (int i = 0; i < built->nlisteners; i++)
        close(built->listeners[i]);
    runner_main(socket, built);
}
