/* Messages as they arrive: sent over a socket with descriptors, received into a small buffer, taken for what they are.
 * No descriptor may be left over, and nothing may be written beyond the buffer. */
#include <errno.h>
#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "fuzz.h"

enum { ROOM = 256, MOST_SENT = 3 };

static int ends[2] = {-1, -1};

static int lowest_free(void)
{
    int fd = dup(ends[0]);
    promise(fd >= 0);
    close(fd);
    return fd;
}

/* The first byte says how many descriptors go along. */
int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size)
{
    if (ends[0] < 0)
        promise(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) == 0);
    if (size < 2 || size > 4096)
        return 0;
    const int sent[MOST_SENT] = {ends[0], ends[1], ends[0]};
    int fds[MAX_FDS], nfds = -1, count = bytes[0] % (MOST_SENT + 1);
    int lowest = lowest_free();
    size_t length = size - 1;
    promise(send_message(ends[0], bytes + 1, length, sent, count) == 0);
    char *buffer = malloc(ROOM);
    promise(buffer != NULL);
    ssize_t got = receive_message(ends[1], buffer, ROOM, fds, &nfds, MSG_DONTWAIT);
    if (length > ROOM) {
        promise(got == -1 && errno == EMSGSIZE && nfds == count);
    } else {
        promise(got == (ssize_t)length && nfds == count && memcmp(buffer, bytes + 1, length) == 0);
        struct prepare_fds places;
        /* As main.c and runner.c do; the message alone, so that a look beyond it is seen. */
        char *message = exact(buffer, (size_t)got);
        switch (request_type(message, (size_t)got)) {
        case MSG_PREPARE:
        case MSG_USERNS:
            if (prepare_layout((const struct prepare_msg *)(void *)message, nfds, &places) == 0) {
                promise(places.first >= 2 && places.count >= 0 && places.cgroups >= 0);
                promise(places.first + places.count + places.copies == nfds);
            }
            touch(message, sizeof(struct prepare_msg));
            break;
        case MSG_ATTACH:
        case MSG_KILL:
        case MSG_KILL_ALL:
        case MSG_LOCATE:
        case MSG_SIGNAL: touch(message, sizeof(struct simple_msg)); break;
        case MSG_EXEC: touch(message, sizeof(struct exec_msg)); break;
        default: break;
        }
        free(message);
    }
    /* Ours to close, also when the message was cut. */
    for (int i = 0; i < nfds; i++)
        close(fds[i]);
    free(buffer);
    promise(lowest_free() == lowest); /* nothing was left open */
    return 0;
}
