/* Network namespaces that are used again, within the session that they were made for.
 *
 * One with nothing but loopback takes longer to make, and to take down, than all else that a copied sandbox needs. So it
 * is kept by a descriptor of ours, and a later sandbox of the session gets it if it is, to the last counter, as it was
 * when it was made: no socket is left in it, and not one packet, nor an attempt at one, has been in it. Otherwise a new
 * one takes its place. It belongs to the user namespace that the session's sandboxes share, in which none of their
 * processes has a capability.
 *
 * It rests for a moment first, so that what the kernel still has to send for the last user (the leaving of a multicast
 * group) is sent, and seen. And it rests for as long as a sandbox lives that was there together with the last user, who
 * may have handed it a file of /proc/net: such a file shows the namespace to whoever holds it. */
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "sbx.h"

enum { MOST_KEPT = 128, MOST_UNUSED = 64, MOST_TEXT = 8192, REST_MS = 50, LINGER_MS = 250, TAKEN = -1 };

/* `user` is the first process of the sandbox that has it, 0 when nobody has; `made_in` is a user namespace by its number,
 * which is nobody else's for as long as we hold what was made in it. It was left at `left_ms`, when `left_seq` was the
 * number of the youngest sandbox. */
static struct kept { int fd, channel; pid_t user; ino_t made_in; int64_t left_ms; uint64_t left_seq; } kept[MOST_KEPT];

/* What a new one says of itself, where all of it is its own. "used" counts every socket, those of killed processes and
 * those on their way in a message included; the numbers behind it are the machine's. */
static const char *const told[] = {"self/net/snmp", "self/net/snmp6", "self/net/ip6_flowlabel", "self/net/rt6_stats"};
static const char unused[] = "sockets: used 0\n";
static struct { char text[MOST_TEXT]; ssize_t size; } new_says[sizeof told / sizeof *told];
static int know_new;

static ssize_t read_text(int proc, const char *name, char *text)
{
    ssize_t size = 0, got = 0;
    int fd = openat(proc, name, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return -1;
    while (size < MOST_TEXT && (got = read(fd, text + size, (size_t)(MOST_TEXT - size))) > 0)
        size += got;
    close(fd);
    return got < 0 || size == MOST_TEXT ? -2 : size; /* equal to nothing */
}

static int is_as_made(int proc)
{
    static char text[MOST_TEXT];
    ssize_t size = read_text(proc, "self/net/sockstat", text);
    if (!know_new || size < (ssize_t)sizeof unused || memcmp(text, unused, sizeof unused - 1) != 0)
        return 0;
    for (size_t i = 0; i < sizeof told / sizeof *told; i++) {
        size = read_text(proc, told[i], text);
        if (size != new_says[i].size || (size > 0 && memcmp(text, new_says[i].text, (size_t)size) != 0))
            return 0;
    }
    return 1;
}

static void learn_new(int proc)
{
    for (size_t i = 0; !know_new && i < sizeof told / sizeof *told; i++) {
        new_says[i].size = read_text(proc, told[i], new_says[i].text);
        if (new_says[i].size < -1)
            return;
    }
    know_new = 1;
}

static int64_t now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* One of this channel's that has rested, else room for a new one, else NULL; `oldest` is the number of the channel's oldest
 * sandbox that lives. */
static struct kept *find(int channel, ino_t made_in, uint64_t oldest)
{
    struct kept *room = NULL;
    int64_t now = now_ms();
    for (struct kept *k = kept; k < kept + MOST_KEPT; k++) {
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

/* For a process in the user namespace `userns`, with all its rights: enters a network namespace, and sets it up by the
 * first steps of the plan if it is a new one. Returns where it is kept, or -1 where there is no room to keep it; -2 with
 * errno when it could not be done. The descriptors of this process are the launcher's. */
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
        if (setns(k->fd, CLONE_NEWNET) == 0 && is_as_made(s->proc))
            return (int)(k - kept);
        forget(k);
    }
    if (unshare(CLONE_NEWNET) < 0 || perform(s->steps, 0, (int)s->prepare->network, &nothing, failed_op) < 0)
        return -2;
    learn_new(s->proc);
    if (!k || (k->fd = openat(s->proc, "self/ns/net", O_RDONLY | O_CLOEXEC)) < 0)
        return -1;
    k->channel = channel;
    k->user = TAKEN;
    k->made_in = st.st_ino;
    return (int)(k - kept);
}

/* What was taken is this one's; or nobody's, if it came to nothing: then it is not known who may be in it. */
void use_network(pid_t user)
{
    for (struct kept *k = kept; k < kept + MOST_KEPT; k++)
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
    for (struct kept *k = kept; !left && k < kept + MOST_KEPT; k++)
        if (k->made_in && k->user == user)
            left = k;
    if (!left)
        return;
    left->user = 0;
    left->left_ms = now_ms();
    left->left_seq = youngest;
    for (const struct kept *k = kept; k < kept + MOST_KEPT; k++)
        unused_here += k->made_in && k->user == 0 && k->channel == left->channel;
    if (unused_here > MOST_UNUSED)
        forget(left);
}

/* A session keeps them as long as it has a sandbox, running or waiting, and a moment longer: the next may be about to be
 * made. Returns in how many milliseconds to look again, -1 for not at all. */
int forget_networks(int (*is_busy)(int channel))
{
    int64_t now = 0, left;
    int again = -1;
    for (struct kept *k = kept; k < kept + MOST_KEPT; k++) {
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

/* The session is over: its number will be another one's. */
void forget_networks_of(int channel)
{
    for (struct kept *k = kept; k < kept + MOST_KEPT; k++)
        if (k->made_in && k->channel == channel)
            forget(k);
}
