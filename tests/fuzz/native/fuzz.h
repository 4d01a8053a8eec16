/* What the targets share. Each has libFuzzer's entry, and is linked with libFuzzer or with standalone.c. */
#ifndef FUZZ_H
#define FUZZ_H

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "../../../native/sbx.h"

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);

/* A broken promise ends the program, so that the input is kept. */
static inline void promise(int kept)
{
    if (!kept)
        abort();
}

/* An exact copy on the heap, so that a read past either end is seen; aligned as the launcher's own buffers are. */
static inline char *exact(const void *bytes, size_t size)
{
    char *copy = malloc(size ? size : 1);
    promise(copy != NULL);
    if (size)
        memcpy(copy, bytes, size);
    return copy;
}

/* Reads every byte, which is what makes the sanitizer look at each. */
static inline void touch(const void *bytes, size_t size)
{
    for (size_t i = 0; i < size; i++)
        (void)((const volatile unsigned char *)bytes)[i];
}

#endif
