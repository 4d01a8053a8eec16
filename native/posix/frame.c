/* Messages over a stream socket, with descriptors.
 *
 * Descriptors arrive with the first byte of their frame, but a read may return the end of one frame and the beginning of the
 * next. They are therefore queued, and each frame takes as many as its head announces. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "posix.h"

/* Returns -1 unless all of it was sent. Frames to the host are small: if the buffer has no room for one, the host is stuck. */
int frame_send(int socket, const void *bytes, size_t size, int flags)
{
    struct frame head = {.size = (uint32_t)size};
    char whole[sizeof head + 1024];
    if (size > sizeof whole - sizeof head)
        size = sizeof whole - sizeof head, head.size = (uint32_t)size;
    memcpy(whole, &head, sizeof head);
    memcpy(whole + sizeof head, bytes, size);
    ssize_t sent;
    do
        sent = send(socket, whole, sizeof head + size, flags);
    while (sent < 0 && errno == EINTR);
    return sent == (ssize_t)(sizeof head + size) ? 0 : -1;
}

static ssize_t receive(int socket, void *bytes, size_t room, int *fds, int *nfds, int max, int flags)
{
    union { char space[CMSG_SPACE(sizeof(int) * MAX_FDS)]; struct cmsghdr align; } control;
    struct iovec iov = {.iov_base = bytes, .iov_len = room};
    struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = control.space, .msg_controllen = sizeof control};
    ssize_t got;
    do
        got = recvmsg(socket, &msg, flags);
    while (got < 0 && errno == EINTR);
    if (got < 0)
        return -1;
    for (struct cmsghdr *c = CMSG_FIRSTHDR(&msg); c; c = CMSG_NXTHDR(&msg, c)) {
        if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
            continue;
        int n = (int)((c->cmsg_len - CMSG_LEN(0)) / sizeof(int));
        for (int i = 0; i < n; i++) {
            int fd;
            memcpy(&fd, CMSG_DATA(c) + sizeof(int) * (size_t)i, sizeof fd);
            fcntl(fd, F_SETFD, FD_CLOEXEC); /* this program has one thread: nothing is started in between */
            if (*nfds < max)
                fds[(*nfds)++] = fd;
            else
                close(fd);
        }
    }
    if (msg.msg_flags & MSG_CTRUNC) {
        errno = EMFILE;
        return -1;
    }
    return got;
}

/* Waits for one frame and no byte of the next. Returns its size, 0 at the end, -1 with errno. */
ssize_t frame_wait(int socket, void *bytes, size_t room, int *fds, int *nfds)
{
    struct frame head = {0};
    size_t have = 0;
    *nfds = 0;
    while (have < sizeof head) {
        ssize_t got = receive(socket, (char *)&head + have, sizeof head - have, fds, nfds, MAX_FDS, 0);
        if (got <= 0)
            return got == 0 && have ? (errno = EPROTO, -1) : got;
        have += (size_t)got;
    }
    if (head.size == 0 || head.size > room || head.nfds > MAX_FDS) {
        errno = EPROTO;
        return -1;
    }
    for (have = 0; have < head.size;) {
        ssize_t got = receive(socket, (char *)bytes + have, head.size - have, fds, nfds, MAX_FDS, 0);
        if (got <= 0) {
            errno = got ? errno : EPROTO;
            return -1;
        }
        have += (size_t)got;
    }
    if (*nfds != (int)head.nfds) {
        errno = EPROTO;
        return -1;
    }
    return (ssize_t)have;
}

/* Reads what has arrived. Returns 0 at the end, -1 with errno. */
int inbox_fill(struct inbox *in, int socket)
{
    if (in->used == in->room)
        return errno = EMSGSIZE, -1;
    ssize_t got = receive(socket, in->bytes + in->used, in->room - in->used, in->fds, &in->nfds, MAX_FDS, MSG_DONTWAIT);
    if (got > 0)
        in->used += (size_t)got;
    return got > 0 ? 1 : (int)got;
}

/* The first whole frame: its size, 0 if none has arrived, -1 if the bytes are no frame. */
ssize_t inbox_first(struct inbox *in, const void **bytes, int *fds, int *nfds)
{
    struct frame head;
    *nfds = 0;
    if (in->used < sizeof head)
        return 0;
    memcpy(&head, in->bytes, sizeof head);
    if (head.size == 0 || head.size > in->room - sizeof head || head.nfds > MAX_FDS)
        return errno = EPROTO, -1;
    if (in->used < sizeof head + head.size)
        return 0;
    if ((int)head.nfds > in->nfds)
        return errno = EPROTO, -1;
    *nfds = (int)head.nfds;
    memcpy(fds, in->fds, sizeof(int) * head.nfds);
    in->nfds -= (int)head.nfds;
    memmove(in->fds, in->fds + head.nfds, sizeof(int) * (size_t)in->nfds);
    *bytes = in->bytes + sizeof head;
    return (ssize_t)head.size;
}

/* Drops the frame that inbox_first() returned. */
void inbox_drop(struct inbox *in)
{
    struct frame head;
    memcpy(&head, in->bytes, sizeof head);
    size_t whole = sizeof head + head.size;
    in->used -= whole;
    memmove(in->bytes, in->bytes + whole, in->used);
}
