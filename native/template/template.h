/* The parts of the template's library. */
#ifndef TEMPLATE_H
#define TEMPLATE_H

#include <stddef.h>
#include <stdint.h>

struct range { uint64_t at, size; };

/* serve.c */
/* Forks a sandbox for each request on `launcher`, until that or `host` is closed. Returns in the process of a command. */
void serve_forks(int launcher, int host);
/* In a fork of the template that runs a script as a rehearsal: it writes a byte to `fd` at the end of its exit, and stops. */
void rehearse(int fd);
/* Sets the memory to copy ahead: `written` ranges that a script writes, and then those that it reads. */
void set_ranges(const struct range *given, size_t written, size_t all);
/* The environment of the command, in the process that serve_forks has returned in. */
char **command_environment(void);

/* finish.c */
/* Returns whether the end of Python can be shortened here. */
int can_finish(void);
/* Ends Python's clean-up at one of its audit events: at the first if the interpreter need not be cleared, else at the last. */
int finish_at_event(int is_early);
/* Returns from Py_FinalizeEx, in which this is called; returns here if that is not possible. */
void return_from_finalize(void);

#endif
