/* A pseudo-terminal of the sandbox's own: the command gets its device, the host the other end.
 *
 * The host gets the device too, and only holds it: a command that closes its terminal for a while must not lose it. */
#include <errno.h>
#include <fcntl.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <unistd.h>

#include "sbx.h"

#ifndef TIOCGPTPEER
#define TIOCGPTPEER _IO('T', 0x41)
#endif

/* Returns the host's end, which never waits; `device` becomes the command's. */
static int open_terminal(uint32_t rows, uint32_t cols, int *device)
{
    struct winsize size = {.ws_row = (unsigned short)rows, .ws_col = (unsigned short)cols};
    struct termios modes;
    int locked = 0, host = open("/dev/ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC | O_NONBLOCK);
    if (host < 0)
        return -1;
    /* By the descriptor, not by a name: what the name shows may be another instance. */
    if (ioctl(host, TIOCSPTLCK, &locked) < 0 || ioctl(host, TIOCSWINSZ, &size) < 0 ||
        (*device = ioctl(host, TIOCGPTPEER, O_RDWR | O_NOCTTY | O_CLOEXEC)) < 0)
        goto failed;
    if (tcgetattr(*device, &modes) == 0) {
        modes.c_iflag |= IUTF8; /* a backspace takes a whole character */
        if (tcsetattr(*device, TCSANOW, &modes) == 0)
            return host;
    }
    close(*device);
failed:;
    int saved = errno;
    close(host);
    errno = saved;
    return -1;
}

/* Returns the command's end. */
int give_terminal(int socket, uint32_t rows, uint32_t cols)
{
    struct simple_msg msg = {.type = MSG_TERMINAL};
    int ends[2];
    ends[0] = open_terminal(rows, cols, &ends[1]);
    if (ends[0] < 0)
        return -1;
    int sent = send_message(socket, &msg, sizeof msg, ends, 2);
    close(ends[0]);
    return sent < 0 ? -1 : ends[1];
}
