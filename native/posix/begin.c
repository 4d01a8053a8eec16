/* Decodes the message that begins a sandbox. Pure: no system call, no allocation, so that it can be fuzzed. */
#include <string.h>

#include "posix.h"

int begin_decode(const struct begin_msg *m, size_t size, char *body, char **label, char **args)
{
    char *next = body, *end = body + (size - sizeof *m);
    if (m->zero != 0 || m->args >= MAX_WRAPPER_ARGS || next == end || end[-1] != 0)
        return -1;
    *label = next;
    next += strlen(next) + 1;
    for (uint32_t i = 0; i < m->args; i++) {
        if (next >= end)
            return -1;
        args[i] = next;
        next += strlen(next) + 1;
    }
    return next == end && strlen(*label) < MAX_LABEL ? 0 : -1;
}
