/* Network namespaces that are reused within the session that they were made for.
 *
 * Making and destroying a namespace with only a loopback interface takes longer than everything else that a copied sandbox
 * needs. The launcher therefore keeps a descriptor of it, and a later sandbox of the session gets the namespace if every
 * counter equals that of a new one: no socket is left in it, and no packet was sent or attempted. Otherwise a new one is
 * made. It belongs to the user namespace that the session's sandboxes share, in which none of their processes has a
 * capability.
 *
 * A namespace rests for a moment before reuse, so that packets that the kernel still sends for the last user (leaving a
 * multicast group) are counted. It also rests while any sandbox lives that existed together with the last user: the user
 * may have passed it a file of /proc/net, which shows the namespace to every process that holds it. */
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "sbx.h"

enum { MAX_KEPT = 128, MAX_UNUSED = 64, MAX_TEXT = 8192, REST_MS = 50, LINGER_MS = 250, TAKEN = -1 };

/* `user` is the first process of the sandbox that uses the namespace, 0 for none; `made_in` is the inode of its user
 * namespace, which is not reused while the descriptor is open. The last user ended at `left_ms`, when `left_seq` was the
 * number of the youngest sandbox. */
static struct kept { int fd, channel; pid_t user; ino_t made_in; int64_t left_ms; uint64_t left_seq; } kept[MAX_KEPT];

/* Files of /proc whose whole content belongs to the namespace, and their content in a new one. "used" counts every socket,
 * including those of killed processes and those in transit in a message; the numbers after it are the machine's. */
static const char *const baseline_files[] = {"self/net/snmp", "self/net/snmp6", "self/net/ip6_flowlabel", "self/net/rt6_stats"};
static const char unused[] = "sockets: used 0\n";
static struct { char text[MAX_TEXT]; ssize_t size; } baseline[sizeof baseline_files / sizeof *baseline_files];
static int has_baseline;

static ssize_t read_text(int proc, const char *name, char *text)
{
    ssize_t size = 0, got = 0;
    int fd = openat(proc, name, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return -1;
    while (size < MAX_TEXT && (got = read(fd, text + size, (size_t)(MAX_TEXT - size))) > 0)
        size += got;
    close(fd);
    return got < 0 || size == MAX_TEXT ? -2 : size; /* never equal to a baseline */
}

static int is_pristine(int proc)
{
    static char text[MAX_TEXT];
    ssize_t size = read_text(proc, "self/net/sockstat", text);
    if (!has_baseline || size < (ssize_t)sizeof unused || memcmp(text, unused, sizeof unused - 1) != 0)
        return 0;
    for (size_t i = 0; i < sizeof baseline_files / sizeof *baseline_files; i++) {
        size = read_text(proc, baseline_files[i], text);
        if (size != baseline[i].size || (size > 0 && memcmp(text, baseline[i].text, (size_t)size) != 0))
            return 0;
    }
    return 1;
}

static void record_baseline(int proc)
{
    for (size_t i = 0; !has_baseline && i < sizeof baseline_files / sizeof *baseline_files; i++) {
        baseline[i].size = read_text(proc, baseline_files[i], baseline[i].text);
        if (baseline[i].size < -1)
            return;
    }
    has_baseline = 1;
}

/* Whether no process of this machine has outlived its command: such a process may still be in the namespace, or hold a file
 * of it. Each of them, or one that it descends from, is a child of the machine's first process. */
static int is_vacant(void)
{
    char byte;
    SCOPED_FD children = open("/proc/1/task/1/children", O_RDONLY | O_CLOEXEC);
    return children >= 0 && read(children, &byte, 1) == 0;
}

static int64_t now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* Returns a namespace of this channel that has rested, else a free entry, else NULL; `oldest` is the number of the channel's
 * oldest living sandbox. */
static struct kept *find(int channel, ino_t made_in, uint64_t oldest)
{
    struct kept *room = NULL;
    int64_t now = now_ms();
    for (struct kept *k = kept; k < kept + MAX_KEPT; k++) {
        if (!k->made_in)
            room = k;
        else if (k->user == 0 && k->channel == channel && k->made_in == made_in && oldest > k->left_seq &&
                 now - k->left_ms >= REST_MS)
            return k;
    }
    return room;
}

static void forget(struct kept *k)
{
    if (k->made_in)
        close(k->fd);
    k->made_in = 0;
}

/* Called by a process in the user namespace `userns` that has all capabilities there: enters a network namespace, and sets
 * a new one up by the first steps of the plan. Returns its index, -1 if there is no entry to keep it, or -2 with errno on
 * failure. This process shares the launcher's descriptors. */
int enter_network(const struct sandbox *s, int channel, int userns, uint64_t oldest, uint32_t *failed_op)
{
    struct stat st;
    struct built nothing = {.life = -1};
    *failed_op = OP_COPY;
    if (fstat(userns, &st) < 0)
        return -2;
    struct kept *k = find(channel, st.st_ino, oldest);
    if (k && k->made_in) {
        k->user = TAKEN;
        if ((!(s->prepare->flags & PREPARE_JOIN) || is_vacant()) && setns(k->fd, CLONE_NEWNET) == 0 && is_pristine(s->proc))
            return (int)(k - kept);
        forget(k);
    }
    if (unshare(CLONE_NEWNET) < 0 || perform_steps(s->steps, 0, (int)s->prepare->network, &nothing, failed_op) < 0)
        return -2;
    record_baseline(s->proc);
    if (!k || (k->fd = openat(s->proc, "self/ns/net", O_RDONLY | O_CLOEXEC)) < 0)
        return -1;
    k->channel = channel;
    k->user = TAKEN;
    k->made_in = st.st_ino;
    return (int)(k - kept);
}

/* Assigns the reserved namespace to its user. If the sandbox was not made, it is unknown which process may be in the
 * namespace, so it is dropped. */
void use_network(pid_t user)
{
    for (struct kept *k = kept; k < kept + MAX_KEPT; k++)
        if (k->made_in && k->user == TAKEN) {
            if (user > 0)
                k->user = user;
            else
                forget(k);
        }
}

/* `youngest` is the number of the last sandbox that was made. */
void leave_network(pid_t user, uint64_t youngest)
{
    struct kept *left = NULL;
    int unused_here = 0;
    for (struct kept *k = kept; !left && k < kept + MAX_KEPT; k++)
        if (k->made_in && k->user == user)
            left = k;
    if (!left)
        return;
    left->user = 0;
    left->left_ms = now_ms();
    left->left_seq = youngest;
    for (const struct kept *k = kept; k < kept + MAX_KEPT; k++)
        unused_here += k->made_in && k->user == 0 && k->channel == left->channel;
    if (unused_here > MAX_UNUSED)
        forget(left);
}

/* A session keeps its namespaces while it has a sandbox, running or waiting, and for LINGER_MS longer: the next one may be
 * about to be made. Returns the milliseconds until the next check, -1 for none. */
int forget_networks(int (*is_busy)(int channel))
{
    int64_t now = 0, left;
    int again = -1;
    for (struct kept *k = kept; k < kept + MAX_KEPT; k++) {
        if (!k->made_in || k->user != 0 || is_busy(k->channel))
            continue;
        now = now ? now : now_ms();
        left = k->left_ms + LINGER_MS - now;
        if (left <= 0)
            forget(k);
        else if (again < 0 || left < again)
            again = (int)left;
    }
    return again;
}

/* The session has ended: its channel number will be reused. */
void forget_networks_of(int channel)
{
    for (struct kept *k = kept; k < kept + MAX_KEPT; k++)
        if (k->made_in && k->channel == channel)
            forget(k);
}
