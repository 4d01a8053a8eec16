/* Set-up of the network inside: messages that Python has composed are sent, and the kernel's answers counted. */
#include <errno.h>
#include <linux/netlink.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "sbx.h"

/* Pure. An error repeats the message that it is about, so it may be cut: its number counts all the same. Behind a message
 * that is cut there is no other. */
int netlink_acks(const char *reply, size_t size, int *error)
{
    int acks = 0;
    *error = 0;
    for (size_t at = 0; at + sizeof(struct nlmsghdr) + sizeof(int32_t) <= size;) {
        struct nlmsghdr head;
        int32_t said;
        memcpy(&head, reply + at, sizeof head);
        memcpy(&said, reply + at + sizeof head, sizeof said);
        if (head.nlmsg_len < sizeof head)
            break;
        if (head.nlmsg_type == NLMSG_ERROR) {
            if (said != 0) {
                *error = said < 0 && said > -4096 ? -said : EPROTO;
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
    int fd = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, protocol), error = 0, result = -1;
    if (fd < 0)
        return -1;
    if (send(fd, bytes, size, 0) != (ssize_t)size) {
        error = errno;
        goto out;
    }
    while (acks > 0) {
        ssize_t got = recv(fd, reply, sizeof reply, 0);
        if (got <= 0) {
            error = got < 0 ? errno : EPROTO;
            goto out;
        }
        int seen = netlink_acks(reply, (size_t)got, &error);
        if (seen < 0)
            goto out;
        acks -= seen;
    }
    result = 0;
out:
    close(fd);
    errno = error;
    return result;
}
