/* Drives a target where there is no libFuzzer, blindly: `target SEED COUNT FILE...` runs each file as it is, and then
 * COUNT mutations of them. Prints how many inputs were run. */
#include <stdio.h>

#include "fuzz.h"

enum { MOST = 1 << 20 };

static unsigned long long state;

static unsigned int draw(unsigned int below)
{
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return (unsigned int)(state >> 33) % below;
}

static size_t mutate(unsigned char *work, size_t used)
{
    static const uint32_t odd[] = {0, 1, 7, 8, 0x7f, 0x80, 0xff, 0x100, 0xffff, 0x7fffffff, 0x80000000u, 0xfffffff8u, 0xffffffffu};
    for (unsigned int m = 1 + draw(5); m > 0 && used > 0; m--) {
        unsigned int at = draw((unsigned int)used);
        switch (draw(6)) {
        case 0: work[at] ^= (unsigned char)(1u << draw(8)); break;
        case 1: work[at] = (unsigned char)draw(256); break;
        case 2: used -= draw((unsigned int)used) % 64; break;
        case 3:
            at &= ~3u;
            if (used - at >= 4)
                memcpy(work + at, &odd[draw(sizeof odd / sizeof *odd)], 4);
            break;
        case 4:
            if (used < MOST) {
                memmove(work + at + 1, work + at, used - at);
                used++;
            }
            break;
        default: work[at] = 0; break;
        }
    }
    return used;
}

int main(int argc, char **argv)
{
    static unsigned char seed[MOST], work[MOST];
    if (argc < 4)
        return 2;
    state = strtoull(argv[1], NULL, 10);
    long count = strtol(argv[2], NULL, 10), run = 0;
    for (long i = 0; i < count + argc - 3;) {
        int as_it_is = i < argc - 3;
        FILE *file = fopen(argv[3 + (as_it_is ? (unsigned int)i : draw((unsigned int)argc - 3))], "rb");
        if (!file)
            return 2;
        size_t size = fread(seed, 1, sizeof seed, file);
        fclose(file);
        for (int k = 0; k < (as_it_is ? 1 : 64) && i < count + argc - 3; k++, i++, run++) {
            memcpy(work, seed, size);
            LLVMFuzzerTestOneInput(work, as_it_is ? size : mutate(work, size));
        }
    }
    printf("%ld\n", run);
    return 0;
}
