/* Plans: whatever is accepted lies within its bytes, is of a known shape, and refers to descriptors that are there. */
#include "fuzz.h"

enum { DESCRIPTORS = 5 };

static int inside(const char *bytes, size_t size, const char *data, size_t len)
{
    return data >= bytes && data <= bytes + size && len <= (size_t)(bytes + size - data);
}

/* Also what the launcher does with each kind of step before it asks the kernel. */
static void check_step(const struct step *step, const char *bytes, size_t size)
{
    promise(step->op >= OP_BIND && step->op <= OP_LAST);
    for (int k = 0; k < 2; k++) {
        promise(inside(bytes, size, step->data[k], step->len[k]));
        touch(step->data[k], step->len[k]);
    }
    switch (step->op) {
    case OP_BIND: {
        int source, idmap;
        promise(strlen(step->data[0]) + 1 == step->len[0] && strlen(step->data[1]) + 1 == step->len[1]);
        if (bind_refs(step, DESCRIPTORS, &source, &idmap) == 0)
            promise(source >= -1 && source < DESCRIPTORS && idmap >= -1 && idmap < DESCRIPTORS);
        break;
    }
    case OP_SECCOMP: promise(step->len[0] % 8 == 0 && step->len[0] / 8 >= 1 && step->len[0] / 8 <= 4096); break;
    case OP_LISTEN: promise(step->len[0] >= 2 && step->len[0] <= 128); break;
    default: break;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size)
{
    static struct step steps[MAX_STEPS];
    char *copy = exact(bytes, size);
    int n = plan_decode((const unsigned char *)copy, size, steps, MAX_STEPS);
    promise(n >= -1 && n <= MAX_STEPS);
    for (int i = 0; i < n; i++) {
        check_step(&steps[i], copy, size);
        /* A plan within a plan is decoded by the process inside, from its own copy. */
        if (steps[i].op == OP_WRAP) {
            static struct step inner[MAX_STEPS];
            char *again = exact(steps[i].data[1], steps[i].len[1]);
            int m = plan_decode((const unsigned char *)again, steps[i].len[1], inner, MAX_STEPS);
            for (int k = 0; k < m; k++)
                check_step(&inner[k], again, steps[i].len[1]);
            free(again);
        }
    }
    free(copy);
    return 0;
}
