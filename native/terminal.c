/* A pseudo-terminal inside the sandbox: the command gets its device, the host the other end.
 *
 * The host also holds the device, so that a command that closes its terminal can open it again. */
#include <errno.h>
#include <fcntl.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <unistd.h>

#include "sbx.h"

#ifndef TIOCGPTPEER
#define TIOCGPTPEER _IO('T', 0x41)
#endif

/* Opens the host's end, which is non-blocking, and the command's end. */
int open_terminal(int *ends)
{
    struct termios modes;
    int unlocked = 0;
    SCOPED_FD host = open("/dev/ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC | O_NONBLOCK);
    if (host < 0 || ioctl(host, TIOCSPTLCK, &unlocked) < 0)
        return -1;
    /* By the descriptor, not by a name: the name may lead to another instance. */
    SCOPED_FD peer = ioctl(host, TIOCGPTPEER, O_RDWR | O_NOCTTY | O_CLOEXEC);
    if (peer < 0 || tcgetattr(peer, &modes) < 0)
        return -1;
    modes.c_iflag |= IUTF8; /* a backspace removes a whole character */
    if (tcsetattr(peer, TCSANOW, &modes) < 0)
        return -1;
    ends[1] = take_fd(&peer);
    ends[0] = take_fd(&host);
    return 0;
}

/* Opens a terminal, unless one was opened ahead, and sends its host's end to the host. Returns the command's end. */
int send_terminal(int socket, const int *ahead, uint32_t rows, uint32_t cols)
{
    struct winsize size = {.ws_row = (unsigned short)rows, .ws_col = (unsigned short)cols};
    struct simple_msg msg = {.type = MSG_TERMINAL};
    int ends[2] = {ahead ? ahead[0] : -1, ahead ? ahead[1] : -1};
    if (!ahead && open_terminal(ends) < 0)
        return -1;
    if (ioctl(ends[0], TIOCSWINSZ, &size) < 0)
        return -1;
    int sent = send_message(socket, &msg, sizeof msg, ends, 2);
    close(ends[0]);
    return sent < 0 ? -1 : ends[1];
}
