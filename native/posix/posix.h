/* Declarations shared by the files of the portable launcher. Messages and requests are those of ../sbx.h.
 *
 * It does on any POSIX system what the Linux launcher does there, as far as that system allows: it starts, signals, watches
 * and ends commands, and reports how they ended. The differences between systems are in os_*.c, behind the functions at the
 * end of this file. Sockets are streams, because macOS has no SOCK_SEQPACKET for Unix sockets.
 *
 * The rules of ../sbx.h hold here too: no policy, no text that sandboxed code wrote, no "best effort". */
#ifndef POSIX_H
#define POSIX_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "../sbx.h"

/* MSG_BEGIN; followed by the label and `args` arguments of the program that builds the sandbox, all NUL-terminated. */
struct begin_msg { uint32_t type, id, flags, args, processes, zero; uint64_t memory; };
struct memory_msg { uint32_t type, exceeded; uint64_t peak; };

enum { MAX_LABEL = 64, MAX_WRAPPER_ARGS = 2048 };

/* begin.c: splits a MSG_BEGIN; `args` has room for MAX_WRAPPER_ARGS. Returns -1 when its body does not match its head. Pure. */
int begin_decode(const struct begin_msg *m, size_t size, char *body, char **label, char **args);

/* frame.c: messages over a stream; a frame announces its bytes and its descriptors. */
struct frame { uint32_t size, nfds; };
struct inbox { char *bytes; size_t room, used; int fds[MAX_FDS], nfds; };
int frame_send(int socket, const void *bytes, size_t size, int flags);
ssize_t frame_wait(int socket, void *bytes, size_t room, int *fds, int *nfds);
int inbox_fill(struct inbox *in, int socket);
ssize_t inbox_first(struct inbox *in, const void **bytes, int *fds, int *nfds);
void inbox_drop(struct inbox *in);

/* inside.c: waits for the request, in the process that becomes the command. Its progress is written to `status`, a pipe that
 * exec closes. Any other `op` is the operation that failed. */
struct progress { uint32_t op; int32_t error; };
enum { AT_UNUSED = 1, AT_EXEC = 2, AT_EXEC_REPORT = 3 };
_Noreturn void inside(int socket, int status, int report_ready);
enum { INSIDE_SOCKET = 3, INSIDE_STATUS = 4 };

/* tree.c: the processes that belong to a run. Pure. `label` is 1 for a process that has the run's label, 0 for one that has
 * not, and -1 where the system has no labels. */
struct process { uint64_t unique, parent; pid_t pid, ppid, sid; signed char label; };
struct tree { pid_t first; uint64_t *known; size_t nknown, room; };
size_t tree_members(struct tree *t, const struct process *all, size_t n, pid_t *out, size_t max);

/* os_*.c */
int os_cloexec_pipe(int ends[2]);
int os_watch_host(pid_t host);   /* a descriptor that becomes readable when the host has ended, or -1 */
int os_set_label(const char *label); /* in a new process: a label that its descendants inherit and cannot remove */
size_t os_processes(struct process *out, size_t max, const char *label);
uint64_t os_memory(pid_t pid);
uint64_t os_maxrss_kib(long maxrss);
const char *os_own_path(void);

#endif
