/* Decodes requests of the host. Pure: no system call, no allocation, so that it can be fuzzed. */
#include <string.h>

#include "sbx.h"

/* A message of the wrong size has no type, so that no field is read beyond its end. */
uint32_t request_type(const void *bytes, size_t size)
{
    uint32_t type;
    if (size < sizeof type)
        return 0;
    memcpy(&type, bytes, sizeof type);
    switch (type) {
    case MSG_PREPARE:
    case MSG_USERNS: return size == sizeof(struct prepare_msg) ? type : 0;
    case MSG_ATTACH:
    case MSG_KILL:
    case MSG_KILL_ALL:
    case MSG_LOCATE:
    case MSG_CONNECTED:
    case MSG_FOLLOW:
    case MSG_TREE:
    case MSG_SIGNAL: return size == sizeof(struct simple_msg) ? type : 0;
    case MSG_EXEC: return size >= sizeof(struct exec_msg) ? type : 0;
    default: return 0;
    }
}

int prepare_layout(const struct prepare_msg *p, int nfds, struct prepare_fds *out)
{
    out->copies = (p->flags & PREPARE_COPY) == 0 ? 0 : (p->flags & PREPARE_JOIN) != 0 ? NJOINED : 2;
    /* Both live in namespaces that exist, and neither is part of a machine. */
    if ((p->flags & (PREPARE_TEMPLATE | PREPARE_FORK)) != 0 && out->copies != 2)
        return -1;
    if (nfds < 2 + out->copies || nfds > MAX_FDS || p->cgroups > (uint32_t)(nfds - 2 - out->copies))
        return -1;
    out->cgroups = (int)p->cgroups;
    out->first = 2 + out->cgroups;
    out->count = nfds - out->first - out->copies;
    return 0;
}

int exec_layout(const struct exec_msg *h, int nfds, int nslots, struct exec_fds *out)
{
    int next = 0;
    int *const places[] = {&out->stdio[0], &out->stdio[1], &out->stdio[2], &out->script, &out->payload, &out->wait};
    for (int i = 0; i < 6; i++)
        *places[i] = (h->flags & ((uint32_t)EXEC_STDIN << i)) != 0 ? next++ : -1;
    if (next != nfds)
        return -1;
    int needs_slot = (h->flags & (EXEC_SCRIPT | EXEC_WAIT)) != 0;
    return needs_slot && h->slot >= (uint32_t)nslots ? -1 : 0;
}

int exec_decode(const struct exec_msg *h, char *body, size_t size, char **strings, struct exec_body *out)
{
    size_t at = (size_t)h->rlimits * sizeof(struct exec_rlimit);
    uint64_t count = 1ull + h->programs + h->argc + h->envc, used = 0;
    if (h->rlimits > 32 || at > size || count + 3 > MAX_STRINGS || h->argc == 0 || h->programs == 0)
        return -1;
    out->rlimits = (const struct exec_rlimit *)(void *)body;
    char **next = strings;
    out->cwd = NULL;
    while (used < count) {
        char *end = memchr(body + at, 0, size - at);
        if (!end)
            return -1;
        if (used == 0) {
            out->cwd = body + at;
            out->programs = next;
        } else {
            *next++ = body + at;
        }
        used++;
        if (used == 1ull + h->programs) {
            *next++ = NULL;
            out->argv = next;
        }
        if (used == 1ull + h->programs + h->argc) {
            *next++ = NULL;
            out->envp = next;
        }
        at = (size_t)(end + 1 - body);
    }
    *next = NULL;
    return at == size ? 0 : -1;
}
