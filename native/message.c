/* Sends and receives single messages with descriptors; every socket is SEQPACKET. */
#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "sbx.h"

int send_message(int socket, const void *bytes, size_t size, const int *fds, int nfds)
{
    union { char space[CMSG_SPACE(sizeof(int) * MAX_FDS)]; struct cmsghdr align; } control;
    struct iovec iov = {.iov_base = (void *)bytes, .iov_len = size};
    struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1};
    if (nfds > 0) {
        memset(&control, 0, sizeof control);
        msg.msg_control = control.space;
        msg.msg_controllen = CMSG_SPACE(sizeof(int) * (size_t)nfds);
        struct cmsghdr *c = CMSG_FIRSTHDR(&msg);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof(int) * (size_t)nfds);
        memcpy(CMSG_DATA(c), fds, sizeof(int) * (size_t)nfds);
    }
    ssize_t sent;
    do
        sent = sendmsg(socket, &msg, MSG_NOSIGNAL);
    while (sent < 0 && errno == EINTR);
    return sent == (ssize_t)size ? 0 : -1;
}

/* Returns the size, 0 at end of file, or -1 with errno: EAGAIN with MSG_DONTWAIT; EMSGSIZE for a truncated message; EMFILE
 * when there was no room for all descriptors. The caller closes the received descriptors in every case. */
ssize_t receive_message(int socket, void *bytes, size_t size, int *fds, int *nfds, int flags)
{
    union { char space[CMSG_SPACE(sizeof(int) * MAX_FDS)]; struct cmsghdr align; } control;
    struct iovec iov = {.iov_base = bytes, .iov_len = size};
    struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = control.space, .msg_controllen = sizeof control};
    ssize_t got;
    *nfds = 0;
    do
        got = recvmsg(socket, &msg, flags | MSG_CMSG_CLOEXEC);
    while (got < 0 && errno == EINTR);
    if (got < 0)
        return -1;
    for (struct cmsghdr *c = CMSG_FIRSTHDR(&msg); c; c = CMSG_NXTHDR(&msg, c)) {
        if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
            continue;
        int n = (int)((c->cmsg_len - CMSG_LEN(0)) / sizeof(int));
        memcpy(fds + *nfds, CMSG_DATA(c), sizeof(int) * (size_t)n);
        *nfds += n;
    }
    if (msg.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) {
        errno = (msg.msg_flags & MSG_TRUNC) != 0 ? EMSGSIZE : EMFILE;
        return -1;
    }
    return got;
}

void report_failure(int socket, uint32_t op, int error)
{
    struct simple_msg msg = {.type = MSG_FAILED, .id = op, .a = error};
    send_message(socket, &msg, sizeof msg, NULL, 0); /* the host may be gone, and then the report has no reader */
}

/* Refuses a request that was not received completely; its first descriptor is the socket of the process that waits. */
void refuse(const int *fds, int nfds, int error)
{
    if (nfds > 0)
        report_failure(fds[0], OP_FDS, error);
    for (int i = 0; i < nfds; i++)
        close(fds[i]);
}
