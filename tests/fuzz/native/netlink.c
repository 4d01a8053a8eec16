/* Answers about the network: whatever comes, the reading ends, within the bytes that came, and counts no more than fit. */
#include "fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size)
{
    char *reply = exact(bytes, size);
    int error = -1, acks = netlink_acks(reply, size, &error);
    promise(acks >= -1 && acks <= (int)(size / 16) + 1);
    promise(acks < 0 ? error > 0 && error < 4096 : error == 0);
    free(reply);
    return 0;
}
