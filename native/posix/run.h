/* The runs of the portable launcher: one command each, from its first process to the end of its tree. */
#ifndef POSIX_RUN_H
#define POSIX_RUN_H

#include <sys/resource.h>

#include "posix.h"

enum { MAX_STDERR = 400 };

struct run {
    int channel; /* its descriptor; -1 when the channel is closed */
    uint32_t id, flags;
    pid_t pid;
    int socket, status, wrapper_stderr;
    struct inbox in;
    char label[MAX_LABEL], stderr_text[MAX_STDERR];
    size_t nstderr;
    struct tree tree;
    struct progress progress;
    uint64_t memory, peak;
    uint32_t processes;
    char is_wrapped, is_started, is_killed, has_exited, exceeded;
    int wait_status;
    struct rusage used;
};

extern struct run **runs;
extern size_t nruns;

void notify(int socket, uint32_t type, uint32_t id, int32_t a);
void close_fd(int *fd);
void *grow(void *list, size_t n, size_t *room);

int run_begin(int channel, const struct begin_msg *m, char *label, char **args, int socket); /* returns an errno */
void run_kill(struct run *r);
void run_read_progress(struct run *r);
void run_read_stderr(struct run *r);
void run_read_requests(struct run *r);
int run_reap(struct run *r); /* returns 1 when the run is over: its tree has ended and was reported */
void run_forget(struct run *r);
void run_watch(struct run *r);

/* launcher.c: in a new process, closes the sockets of the launcher itself. */
void launcher_close_all(void);

#endif
