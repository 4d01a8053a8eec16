/* Mounts that are made apart from a private root and attached to it later: layers of directories (overlayfs), and copies of
 * mounts that are there already. They leave this process as descriptors, like the namespaces of OP_SHARE. */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "sbx.h"

#ifndef SYS_open_tree
#define SYS_open_tree 428
#define SYS_move_mount 429
#endif
#ifndef SYS_fsopen
#define SYS_fsopen 430
#define SYS_fsconfig 431
#define SYS_fsmount 432
#endif

enum { FS_CLOEXEC = 1, SET_FLAG = 0, SET_STRING = 1, CREATE = 6, CLONE_TREE = 1, RECURSIVE = 0x8000, EMPTY_PATH = 4 };

/* Adds a descriptor to those that are sent to the host. */
static int share(struct built *built, int fd)
{
    if (fd < 0)
        return -1;
    if (built->nshared == NJOINED + 1) {
        close(fd);
        errno = EINVAL;
        return -1;
    }
    built->shared[built->nshared++] = fd;
    return 0;
}

/* The parameters are pairs of texts, each with its NUL; an empty value makes a flag of its name. The names of the layers are
 * resolved here, with the rights of this process. */
static int configure(int fs, const char *at, const char *end)
{
    while (at < end) {
        const char *stop = memchr(at, 0, (size_t)(end - at));
        const char *value = stop ? stop + 1 : end, *last = value < end ? memchr(value, 0, (size_t)(end - value)) : NULL;
        if (!last) {
            errno = EINVAL;
            return -1;
        }
        if (syscall(SYS_fsconfig, fs, *value ? SET_STRING : SET_FLAG, at, *value ? value : NULL, 0) < 0)
            return -1;
        at = last + 1;
    }
    return (int)syscall(SYS_fsconfig, fs, CREATE, NULL, NULL, 0);
}

int make_layers(const struct step *step)
{
    SCOPED_FD fs = (int)syscall(SYS_fsopen, step->data[1], FS_CLOEXEC);
    if (fs < 0 || configure(fs, step->data[0], step->data[0] + step->len[0]) < 0)
        return -1;
    SCOPED_FD made = (int)syscall(SYS_fsmount, fs, FS_CLOEXEC, (unsigned)step->a[0]);
    return take_fd(&made);
}

int attach_tree(int tree, const char *path)
{
    return (int)syscall(SYS_move_mount, tree, "", AT_FDCWD, path, EMPTY_PATH);
}

int share_tree(struct built *built, const char *path)
{
    return share(built, (int)syscall(SYS_open_tree, AT_FDCWD, path, CLONE_TREE | O_CLOEXEC | RECURSIVE));
}
