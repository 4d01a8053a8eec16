/* Network set-up: sends messages that Python composed, and counts the kernel's acknowledgements. */
#include <errno.h>
#include <linux/netlink.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "sbx.h"

/* Pure. An error message repeats the request, so it may be truncated: its error code is still valid. No message follows a
 * truncated one. */
int netlink_acks(const char *reply, size_t size, int *error)
{
    int acks = 0;
    *error = 0;
    for (size_t at = 0; at + sizeof(struct nlmsghdr) + sizeof(int32_t) <= size;) {
        struct nlmsghdr head;
        int32_t code;
        memcpy(&head, reply + at, sizeof head);
        memcpy(&code, reply + at + sizeof head, sizeof code);
        if (head.nlmsg_len < sizeof head)
            break;
        if (head.nlmsg_type == NLMSG_ERROR) {
            if (code != 0) {
                *error = code < 0 && code > -4096 ? -code : EPROTO;
                return -1;
            }
            acks++;
        }
        if (head.nlmsg_len > size - at)
            break;
        at += NLMSG_ALIGN((size_t)head.nlmsg_len);
    }
    return acks;
}

int netlink(int protocol, int acks, const char *bytes, size_t size)
{
    char reply[8192] __attribute__((aligned(4)));
    SCOPED_FD fd = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, protocol);
    if (fd < 0 || send(fd, bytes, size, 0) != (ssize_t)size)
        return -1;
    while (acks > 0) {
        ssize_t got = recv(fd, reply, sizeof reply, 0);
        int error = EPROTO, seen = got > 0 ? netlink_acks(reply, (size_t)got, &error) : -1;
        if (seen < 0) {
            if (got >= 0)
                errno = error;
            return -1;
        }
        acks -= seen;
    }
    return 0;
}
