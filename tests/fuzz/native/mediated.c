/* System calls that a runner performs for its command: numbers, and bytes of the command's memory. Whatever comes, decoding
 * stays within the bytes, its results have no set-id mode, no unterminated path and no invalid time, and no path outside
 * the roots is below them. */
#include <errno.h>
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>

#include "fuzz.h"

static void check_call(const uint8_t *bytes, size_t size)
{
    int nr;
    uint64_t args[6];
    struct mediated call;
    if (size < sizeof nr + sizeof args)
        return;
    memcpy(&nr, bytes, sizeof nr);
    memcpy(args, bytes + sizeof nr, sizeof args);
    /* Near the numbers that are known, else nearly every input is refused at once. */
    int result = mediated_decode(nr & 1 ? nr >> 1 : (int)((unsigned int)nr >> 1) % 512, args, &call);
    promise(result == 0 || (result < 0 && result > -4096));
    if (result)
        return;
    promise(call.kind >= MEDIATED_CONNECT && call.kind <= MEDIATED_THREAD);
    promise(call.size <= MEDIATED_DATA_SIZE);
    if (call.kind == MEDIATED_MODE)
        promise(!(call.mode & 06000) && call.mode <= 07777);
    if (call.kind == MEDIATED_CONNECT)
        promise(call.size >= sizeof(sa_family_t));
}

static void check_data(const uint8_t *bytes, size_t size)
{
    struct destination to;
    struct timespec when[2];
    char *data = exact(bytes, size);
    int result = destination_decode((unsigned char *)data, size, &to);
    promise(result == 0 || (result < 0 && result > -4096));
    if (result == 0)
        promise(to.family == AF_INET || to.family == AF_INET6 || to.family == AF_UNIX);
    if (result == 0 && to.family == AF_UNIX)
        promise(to.path[0] && memchr(to.path, 0, sizeof to.path) != NULL);
    for (enum times_format format = TIMES_NOW; format <= TIMES_NANOSECONDS; format++) {
        if (times_decode((unsigned char *)data, size, format, when) < 0)
            continue;
        if (format == TIMES_MICROSECONDS)
            promise(when[0].tv_nsec >= 0 && when[0].tv_nsec < 1000000000 && when[1].tv_nsec >= 0 && when[1].tv_nsec < 1000000000);
        if (format == TIMES_NOW)
            promise(when[0].tv_nsec == UTIME_NOW && when[1].tv_nsec == UTIME_NOW);
    }
    free(data);
}

static void check_place(const uint8_t *bytes, size_t size)
{
    static const char roots[] = "/srv\0/tmp/s";
    char *path = malloc(size + 1);
    promise(path != NULL);
    memcpy(path, bytes, size);
    path[size] = 0;
    if (is_below(path, roots, sizeof roots))
        promise(strcmp(path, "/srv") == 0 || strncmp(path, "/srv/", 5) == 0 || strcmp(path, "/tmp/s") == 0 ||
                strncmp(path, "/tmp/s/", 7) == 0);
    char *any = exact(bytes, size);
    (void)is_below("/srv/x", any, size);
    free(any);
    free(path);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size)
{
    check_call(bytes, size);
    check_data(bytes, size);
    check_place(bytes, size);
    return 0;
}
