/* The first process of a machine: the pid namespace of a session whose processes outlive the command that started them.
 *
 * It is process 1 there, so sandboxed code can neither signal nor end it, and everything inside ends with it. The kernel
 * reaps the orphans that it inherits. Its one task is to signal all processes of one command: those whose user namespace is
 * the command's. Sandboxed code cannot leave that namespace, whatever it does with sessions, process groups and parents.
 *
 * Sandboxed code has the same id, and can set the resource limits of this process: nothing here opens a descriptor. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "sbx.h"

enum { ROUNDS = 1000, ROUND_NS = 5000000, REQUESTS = 256, ENTRIES = 16384, NAME_AT = 19 /* of d_name in struct linux_dirent64 */ };
enum { PATIENCE = 100 }; /* rounds, half a second: far longer than a command takes from its request to its exec */

/* Sends a signal, unless it is 0, to each process whose user namespace has the inode `label`. Returns the number of those
 * processes. One that cannot be inspected counts for every label, and with `hidden` is killed with all of them: it executes a
 * program that it cannot read. A command between its request and its exec cannot be inspected either, for a moment; it must not
 * be killed with another command. A child has a higher pid than its parent, except once in a round of
 * all pids, and /proc lists them in ascending order: a process that forks meanwhile is rarely missed, and found by the next
 * call. System calls only, without a new descriptor. */
static int signal_members(int proc, uint32_t label, int signum, int hidden)
{
    static _Alignas(8) char entries[ENTRIES];
    char path[64];
    int count = 0;
    long got;
    if (lseek(proc, 0, SEEK_SET) < 0)
        return -1;
    while ((got = syscall(SYS_getdents64, proc, entries, sizeof entries)) > 0) {
        for (long at = 0; at < got;) {
            const char *name = entries + at + NAME_AT;
            unsigned short size = *(const unsigned short *)(const void *)(entries + at + 16);
            long pid = name[0] >= '1' && name[0] <= '9' ? strtol(name, NULL, 10) : 0;
            struct stat st;
            at += size;
            if (pid <= 1)
                continue;
            snprintf(path, sizeof path, "%ld/ns/user", pid);
            if (fstatat(proc, path, &st, 0) < 0) {
                if (errno == ENOENT || errno == ESRCH)
                    continue;
                count++;
                if (hidden && signum == SIGKILL)
                    kill((pid_t)pid, SIGKILL);
            } else if (st.st_ino == label) {
                snprintf(path, sizeof path, "%ld/ns/net", pid);
                if (fstatat(proc, path, &st, 0) < 0 && (errno == ENOENT || errno == ESRCH))
                    continue; /* it has ended, and waits for its parent */
                count++;
                if (signum)
                    kill((pid_t)pid, signum);
            }
        }
    }
    return got < 0 ? -1 : count;
}

/* Requests to kill that are not complete: SIGKILL is repeated until no process is left, as one may just have forked. */
static struct { struct simple_msg msg; int rounds; } killing[REQUESTS];
static int nkilling;

static void answer(int socket, const struct simple_msg *msg, int left)
{
    struct simple_msg done = {.type = MSG_TREE_DONE, .id = msg->id, .a = left, .b = msg->b};
    if (send_message(socket, &done, sizeof done, NULL, 0) < 0)
        _exit(EXIT_SANDBOX);
}

static void begin(int socket, int proc, const struct simple_msg *msg)
{
    int left = signal_members(proc, msg->id, msg->a, 0);
    if (msg->a != SIGKILL || left == 0) {
        answer(socket, msg, left);
        return;
    }
    killing[nkilling].msg = *msg;
    killing[nkilling++].rounds = ROUNDS;
}

static void kill_again(int socket, int proc)
{
    const struct timespec wait = {0, ROUND_NS};
    nanosleep(&wait, NULL);
    for (int i = 0; i < nkilling;) {
        int left = signal_members(proc, killing[i].msg.id, SIGKILL, killing[i].rounds <= ROUNDS - PATIENCE);
        if (left != 0 && --killing[i].rounds > 0) {
            i++;
            continue;
        }
        answer(socket, &killing[i].msg, left);
        killing[i] = killing[--nkilling];
    }
}

_Noreturn void machine_main(int socket)
{
    int proc = open("/proc", O_RDONLY | O_DIRECTORY | O_CLOEXEC), keep[2] = {socket, proc};
    struct sigaction ignore = {.sa_handler = SIG_IGN}; /* the kernel reaps children whose end is ignored */
    prctl(PR_SET_NAME, "machine", 0, 0, 0);
    if (proc < 0 || close_all_but(keep, 2) < 0 || sigaction(SIGCHLD, &ignore, NULL) < 0 || prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) < 0) {
        report_failure(socket, OP_PROCESS, errno);
        _exit(EXIT_SANDBOX);
    }
    for (;;) {
        struct simple_msg msg;
        int fds[MAX_FDS], nfds;
        int room = nkilling < REQUESTS;
        ssize_t got = -1;
        errno = EAGAIN;
        if (room)
            got = receive_message(socket, &msg, sizeof msg, fds, &nfds, nkilling ? MSG_DONTWAIT : 0);
        if (got < 0 && errno == EAGAIN) {
            kill_again(socket, proc);
            continue;
        }
        if (got <= 0)
            _exit(0); /* the host closed the socket, which ends everything inside */
        for (int i = 0; i < nfds; i++)
            close(fds[i]);
        if (request_type(&msg, (size_t)got) != MSG_TREE)
            continue;
        begin(socket, proc, &msg);
    }
}
