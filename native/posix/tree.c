/* The processes that belong to a run. Pure: it is given a list of processes, and is tested with made-up ones.
 *
 * A label that is inherited and cannot be removed decides. Without labels, a process belongs to the run if it is in the
 * run's session, or if its parent belongs to the run, even if that parent has ended: `parent` is the unique number of the
 * process that created this one, where the system keeps it. An orphan whose parent was never listed is not found. */
#include <stdlib.h>

#include "posix.h"

static int is_known(const struct tree *t, uint64_t unique)
{
    for (size_t i = 0; i < t->nknown; i++)
        if (t->known[i] == unique)
            return 1;
    return 0;
}

static void remember(struct tree *t, uint64_t unique)
{
    if (unique == 0 || is_known(t, unique))
        return;
    if (t->nknown == t->room) {
        size_t room = t->room ? t->room * 2 : 16;
        uint64_t *more = realloc(t->known, room * sizeof *more);
        if (!more)
            return; /* an orphan may be missed */
        t->known = more;
        t->room = room;
    }
    t->known[t->nknown++] = unique;
}

static int belongs(const struct tree *t, const struct process *p, const struct process *all, const signed char *in, size_t n)
{
    if (p->label >= 0)
        return p->label;
    if (p->pid == t->first || p->sid == t->first || (p->parent && is_known(t, p->parent)))
        return 1;
    for (size_t i = 0; i < n; i++)
        if (in[i] && all[i].pid == p->ppid)
            return 1;
    return 0;
}

/* Returns the number of members; at most `max` are written to `out`. */
size_t tree_members(struct tree *t, const struct process *all, size_t n, pid_t *out, size_t max)
{
    size_t count = 0;
    signed char *in = calloc(n ? n : 1, 1);
    if (!in)
        return 0;
    for (int again = 1; again;) {
        again = 0;
        for (size_t i = 0; i < n; i++) {
            if (in[i] || !belongs(t, &all[i], all, in, n))
                continue;
            in[i] = 1;
            again |= all[i].label < 0; /* with labels, a parent says nothing about its children */
            remember(t, all[i].unique);
            if (count < max)
                out[count] = all[i].pid;
            count++;
        }
    }
    free(in);
    return count;
}
