/* Requests to run a command: what is accepted is exactly as many strings as its head says, each within the message. */
#include "fuzz.h"

static void check_strings(char **list, uint32_t count, const char *body, size_t size)
{
    for (uint32_t i = 0; i < count; i++) {
        promise(list[i] >= body && list[i] < body + size);
        promise(memchr(list[i], 0, (size_t)(body + size - list[i])) != NULL);
    }
    promise(list[count] == NULL);
}

/* The first byte says how many descriptors come along and how many slots there are; the rest is the message. */
int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size)
{
    static char *strings[MAX_STRINGS];
    if (size < 1)
        return 0;
    int nfds = bytes[0] & 7, nslots = bytes[0] >> 3 & 3;
    char *message = exact(bytes + 1, size - 1);
    size--;
    if (request_type(message, size) != MSG_EXEC) {
        free(message);
        return 0;
    }
    const struct exec_msg *h = (const struct exec_msg *)(void *)message;
    struct exec_fds places;
    if (exec_layout(h, nfds, nslots, &places) == 0) {
        const int all[] = {places.stdio[0], places.stdio[1], places.stdio[2], places.script, places.payload, places.wait};
        int seen = 0;
        for (int i = 0; i < 6; i++) {
            promise(all[i] >= -1 && all[i] < nfds);
            if (all[i] >= 0)
                promise(all[i] == seen++);
        }
        promise(seen == nfds);
        promise((places.script < 0 && places.wait < 0) || h->slot < (uint32_t)nslots);
    }
    /* The body of its own, where the sanitizer sees both of its ends: it may come in another file. */
    size_t length = size - sizeof *h;
    char *body = exact(message + sizeof *h, length);
    struct exec_body found;
    if (exec_decode(h, body, length, strings, &found) == 0) {
        promise(found.cwd >= body && found.cwd < body + length);
        promise(h->argc > 0 && h->programs > 0);
        check_strings(found.programs, h->programs, body, length);
        check_strings(found.argv, h->argc, body, length);
        check_strings(found.envp, h->envc, body, length);
        touch(found.rlimits, h->rlimits * sizeof *found.rlimits);
    }
    free(body);
    free(message);
    return 0;
}
