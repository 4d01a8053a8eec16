/* Drives the plan decoder with mutated plans: `fuzz_plan SEED COUNT FILE...` (or with libFuzzer, through its entry). */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../sbx.h"

int LLVMFuzzerTestOneInput(const unsigned char *bytes, size_t size);

int LLVMFuzzerTestOneInput(const unsigned char *bytes, size_t size)
{
    static struct step steps[MAX_STEPS];
    /* An exact copy on the heap, so that a read past the end is seen. */
    unsigned char *copy = malloc(size ? size : 1);
    if (!copy)
        abort();
    memcpy(copy, bytes, size);
    int n = plan_decode(copy, size, steps, MAX_STEPS);
    volatile size_t touched = 0;
    for (int i = 0; i < n; i++)
        for (int k = 0; k < 2; k++) {
            if (steps[i].data[k] < (char *)copy || steps[i].data[k] + steps[i].len[k] > (char *)copy + size)
                abort();
            for (uint32_t at = 0; at < steps[i].len[k]; at++)
                touched += (unsigned char)steps[i].data[k][at];
        }
    free(copy);
    return 0;
}

#ifndef LIBFUZZER
static unsigned long long state;

static unsigned int draw(unsigned int below)
{
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return (unsigned int)(state >> 33) % below;
}

int main(int argc, char **argv)
{
    static unsigned char seed[1 << 20], work[1 << 20];
    state = strtoull(argv[1], NULL, 10);
    long count = strtol(argv[2], NULL, 10), decoded = 0;
    for (long i = 0; i < count;) {
        FILE *file = fopen(argv[3 + draw((unsigned int)argc - 3)], "rb");
        if (!file)
            return 2;
        size_t size = fread(seed, 1, sizeof seed, file);
        fclose(file);
        for (int k = 0; k < 64 && i < count; k++, i++) {
            size_t used = size;
            memcpy(work, seed, size);
            for (unsigned int m = draw(6); m > 0 && used > 0; m--)
                switch (draw(4)) {
                case 0: work[draw((unsigned int)used)] ^= (unsigned char)(1u << draw(8)); break;
                case 1: work[draw((unsigned int)used)] = (unsigned char)draw(256); break;
                case 2: used -= draw((unsigned int)used) % 64; break;
                default: memset(work + draw((unsigned int)used), 0xff, 1); break;
                }
            LLVMFuzzerTestOneInput(work, used);
            decoded++;
        }
    }
    printf("%ld\n", decoded);
    return 0;
}
#endif
