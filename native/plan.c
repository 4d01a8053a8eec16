/* Decodes a plan. Pure: no system call, no allocation, so that it can be fuzzed.
 *
 * A plan is a header (magic, number of steps) and that many steps. A step is a fixed head (op, two lengths, zero, four
 * integers) and two byte strings, each padded to eight bytes. Text must end in exactly one NUL. */
#include <linux/filter.h>
#include <string.h>
#include <sys/socket.h>

#include "sbx.h"

enum { MAGIC = 0x32584253, MAX_BYTES = 1 << 20 };

/* The kind of each byte string of an operation: text, raw bytes, or absent. */
static const char shapes[OP_LAST + 1][3] = {
    [OP_BIND] = "tt",    [OP_ROOT] = "tt",      [OP_MKDIR] = "t-",   [OP_FILE] = "tb",      [OP_SYMLINK] = "tt",
    [OP_TMPFS] = "tt",   [OP_PROC] = "t-",      [OP_DEVPTS] = "tt",  [OP_REMOUNT] = "t-",   [OP_HOSTNAME] = "t-",
    [OP_NETLINK] = "b-", [OP_LISTEN] = "b-",    [OP_SLOT] = "t-",    [OP_LOCKDOWN] = "--",  [OP_LL_CREATE] = "--",
    [OP_LL_PATH] = "t-", [OP_LL_RESTRICT] = "--", [OP_SECCOMP] = "b-", [OP_RLIMIT] = "--",  [OP_SUBREAPER] = "--",
    [OP_DETACH] = "--",  [OP_IDENTITY] = "t-",  [OP_ATTRS] = "t-",   [OP_RESIZE] = "tt",    [OP_WRAP] = "bb",
    [OP_ENTER] = "--",   [OP_COVER] = "tt",     [OP_COUNTER] = "t-", [OP_SHARE] = "--",
    [OP_SOCKOPT] = "b-", [OP_LAYERS] = "bt",    [OP_ATTACH] = "t-",  [OP_TREE] = "t-",
    [OP_TEMPLATE] = "bb",
    [OP_TERMINAL] = "--", [OP_CONFINE] = "--",  [OP_UNPRIVILEGED] = "--", [OP_NICE] = "--", [OP_MEDIATE] = "bb",
};

struct head { uint32_t op, len[2], zero; uint64_t a[4]; };

static size_t padded(uint32_t n) { return ((size_t)n + 7) & ~(size_t)7; }

/* The bounds of the kernel's own structures, which would silently truncate a longer value. */
static int fits(uint32_t op, uint32_t len)
{
    switch (op) {
    case OP_MEDIATE:
    case OP_SECCOMP: return len > 0 && len % sizeof(struct sock_filter) == 0 && len / sizeof(struct sock_filter) <= BPF_MAXINSNS;
    case OP_LISTEN: return len >= sizeof(sa_family_t) && len <= sizeof(struct sockaddr_storage);
    default: return 1;
    }
}

static int well_formed(char shape, const char *data, uint32_t len)
{
    switch (shape) {
    case 't': return len > 0 && memchr(data, 0, len) == data + len - 1;
    case 'b': return 1;
    default: return len == 0;
    }
}

int plan_decode(const unsigned char *bytes, size_t size, struct step *steps, int max)
{
    uint32_t magic, count;
    if (size < 8 || size > MAX_BYTES)
        return -1;
    memcpy(&magic, bytes, 4);
    memcpy(&count, bytes + 4, 4);
    if (magic != MAGIC || count > (uint32_t)max)
        return -1;
    size_t at = 8;
    for (uint32_t i = 0; i < count; i++) {
        struct head head;
        if (size - at < sizeof head)
            return -1;
        memcpy(&head, bytes + at, sizeof head);
        at += sizeof head;
        if (head.op < OP_BIND || head.op > OP_LAST || !shapes[head.op][0] || head.zero != 0)
            return -1;
        struct step *step = &steps[i];
        step->op = head.op;
        memcpy(step->a, head.a, sizeof step->a);
        for (int k = 0; k < 2; k++) {
            if (head.len[k] > size || padded(head.len[k]) > size - at)
                return -1;
            step->len[k] = head.len[k];
            step->data[k] = (const char *)bytes + at;
            if (!well_formed(shapes[head.op][k], step->data[k], head.len[k]))
                return -1;
            at += padded(head.len[k]);
        }
        if (!fits(head.op, head.len[0]))
            return -1;
    }
    return at == size ? (int)count : -1;
}

/* Each index is encoded plus one, 0 for none, in one half of a[3]. */
int bind_refs(const struct step *step, int nfds, int *source, int *idmap)
{
    uint32_t low = (uint32_t)step->a[3], high = (uint32_t)(step->a[3] >> 32);
    if (low > (uint32_t)nfds || high > (uint32_t)nfds)
        return -1;
    *source = (int)low - 1;
    *idmap = (int)high - 1;
    return 0;
}
