/* Performs the steps of a plan inside a new set of namespaces.
 *
 * There are two passes. First every source of a bind is opened as a detached copy of its mount tree, while the caller's root
 * and ids are still in place; then the private root is entered and everything is attached there. So no step ever resolves a
 * name in a tree that sandboxed code could have changed. */
#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/landlock.h>
#include <linux/seccomp.h>
#include <linux/securebits.h>
#include <sched.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "sbx.h"

#ifndef SYS_open_tree
#define SYS_open_tree 428
#define SYS_move_mount 429
#endif
#ifndef SYS_openat2
#define SYS_openat2 437
#endif
#ifndef SYS_mount_setattr
#define SYS_mount_setattr 442
#endif
#ifndef SYS_landlock_create_ruleset
#define SYS_landlock_create_ruleset 444
#define SYS_landlock_add_rule 445
#define SYS_landlock_restrict_self 446
#endif

enum { TREE_CLONE = 1, TREE_CLOEXEC = O_CLOEXEC, AT_TREE_RECURSIVE = 0x8000, MOVE_F_EMPTY_PATH = 4, MOUNT_IDMAP = 0x100000 };

/* Constants of struct open_how and of struct statx (an index of 64-bit words): their headers clash with the C library's. */
enum { RESOLVE_NO_SYMLINKS = 4, STATX_ATTRIBUTES = 1, STATX_MOUNT_ROOT = 0x2000 };

struct attr { uint64_t set, clear, propagation, userns_fd; };

int tree_fds[MAX_STEPS];

int open_source(const struct step *step, const int *fds, int nfds)
{
    int source, idmap;
    if (bind_refs(step, nfds, &source, &idmap) < 0) {
        errno = EBADF;
        return -1;
    }
    SCOPED_FD tree = (int)syscall(SYS_open_tree, source >= 0 ? fds[source] : AT_FDCWD, source >= 0 ? "" : step->data[0],
                            TREE_CLONE | TREE_CLOEXEC | AT_TREE_RECURSIVE | (source >= 0 ? AT_EMPTY_PATH : 0));
    if (tree < 0)
        return -1;
    struct stat st;
    struct attr attr = {.set = step->a[0] & ~BIND_EXISTING, .propagation = MS_PRIVATE};
    if (idmap >= 0) {
        attr.set |= MOUNT_IDMAP;
        attr.userns_fd = (uint64_t)fds[idmap];
    }
    if (fstat(tree, &st) < 0)
        return -1;
    if (step->a[2] && (st.st_dev != step->a[1] || st.st_ino != step->a[2])) {
        errno = ESTALE; /* another directory has replaced the session's */
        return -1;
    }
    if (syscall(SYS_mount_setattr, tree, "", AT_EMPTY_PATH | AT_TREE_RECURSIVE, &attr, sizeof attr) < 0)
        return -1;
    return take_fd(&tree);
}

/* Opens the sources of all binds that are (or are not) id-mapped. */
int open_sources(struct step *steps, int n, const int *fds, int nfds, int idmapped)
{
    for (int i = 0; i < n; i++) {
        if (steps[i].op != OP_BIND || (steps[i].a[3] >> 32 != 0) != idmapped)
            continue;
        tree_fds[i] = open_source(&steps[i], fds, nfds);
        if (tree_fds[i] < 0)
            return -1;
    }
    return 0;
}

static int make_file(const char *path, mode_t mode, const char *bytes, size_t size)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, mode);
    if (fd < 0)
        return -1;
    int result = fchmod(fd, mode);
    for (size_t at = 0; result == 0 && at < size;) {
        ssize_t wrote = write(fd, bytes + at, size - at);
        if (wrote < 0)
            result = -1;
        else
            at += (size_t)wrote;
    }
    close(fd);
    return result;
}

static int attach(const struct step *step, int tree)
{
    struct stat st;
    if (fstat(tree, &st) < 0)
        return -1;
    if (!(step->a[0] & BIND_EXISTING)) {
        int made = S_ISDIR(st.st_mode) ? mkdir(step->data[1], 0755) : make_file(step->data[1], 0444, NULL, 0);
        if (made < 0 && errno != EEXIST)
            return -1;
    }
    int moved = (int)syscall(SYS_move_mount, tree, "", AT_FDCWD, step->data[1], MOVE_F_EMPTY_PATH);
    close(tree);
    return moved;
}

static int old_root = -1;

static int make_root(const char *where, const char *options)
{
    if (mount("sandbox", where, "tmpfs", MS_NOSUID | MS_NODEV, options) < 0)
        return -1;
    return chdir(where);
}

static int enter_root(int move)
{
    if (move) {
        /* The caller's root stays below, covered: only a process that may unmount could uncover it. Profiles that allow
         * CAP_SYS_ADMIN but not CAP_SYS_CHROOT refuse chroot; entering the namespace again has the same effect. */
        SCOPED_FD here = open("/proc/self/ns/mnt", O_RDONLY | O_CLOEXEC);
        if (here < 0 || mount(".", "/", NULL, MS_MOVE, NULL) < 0 || (chroot(".") < 0 && setns(here, CLONE_NEWNS) < 0))
            return -1;
        return chdir("/");
    }
    old_root = open("/", O_PATH | O_DIRECTORY | O_CLOEXEC);
    /* The old root is now stacked on the new one, out of reach of any path. It must stay until /proc is mounted: the kernel
     * allows a new /proc only where a fully visible one exists. */
    if (old_root < 0 || syscall(SYS_pivot_root, ".", ".") < 0)
        return -1;
    return chdir("/");
}

static int detach_root(void)
{
    if (fchdir(old_root) < 0 || umount2(".", MNT_DETACH) < 0)
        return -1;
    close(old_root);
    return chdir("/");
}

/* With `mounted`, no component of the path may be a link, and the path must be a mount point: a mount in a directory that
 * others write is lost when they replace the directory, and ends up elsewhere when they put a link in its way. */
static int check_identity(const char *path, uint64_t device, uint64_t inode, int mounted)
{
    struct stat st;
    uint64_t how[3] = {O_PATH | O_CLOEXEC, 0, RESOLVE_NO_SYMLINKS}, about[32] = {0};
    SCOPED_FD fd = mounted ? (int)syscall(SYS_openat2, AT_FDCWD, path, how, sizeof how) : open(path, O_PATH | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &st) < 0 || (mounted && syscall(SYS_statx, fd, "", AT_EMPTY_PATH, 0, about) < 0))
        return -1;
    if (st.st_dev == device && st.st_ino == inode && (!mounted || about[STATX_ATTRIBUTES] & STATX_MOUNT_ROOT))
        return 0;
    errno = ESTALE;
    return -1;
}

static int add_attrs(const char *path, uint64_t attrs)
{
    struct attr attr = {.set = attrs};
    return (int)syscall(SYS_mount_setattr, AT_FDCWD, path, AT_TREE_RECURSIVE, &attr, sizeof attr);
}

static int resize(const char *path, unsigned long flags, mode_t mode, const char *options)
{
    if (mount("none", path, NULL, MS_REMOUNT | flags, options) < 0)
        return -1;
    return chmod(path, mode);
}

static int lockdown(unsigned long securebits)
{
    if (prctl(PR_SET_SECUREBITS, securebits, 0, 0, 0) < 0)
        return -1;
    unsigned long cap = 0;
    while (prctl(PR_CAPBSET_DROP, cap, 0, 0, 0) == 0)
        cap++;
    if (cap == 0 || errno != EINVAL) /* the first capability that this kernel does not support */
        return -1;
    if (prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0) < 0)
        return -1;
    struct __user_cap_header_struct head = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct none[2];
    memset(none, 0, sizeof none);
    if (syscall(SYS_capset, &head, none) < 0)
        return -1;
    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
}

static int listener(const struct step *step)
{
    int on = 1;
    SCOPED_FD fd = socket((int)step->a[0], (int)step->a[1] | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) < 0 ||
        bind(fd, (const struct sockaddr *)step->data[0], (socklen_t)step->len[0]) < 0 ||
        ((int)step->a[1] == SOCK_STREAM && listen(fd, (int)step->a[2]) < 0))
        return -1;
    return take_fd(&fd);
}

static int allow_path(int ruleset, uint64_t access, const char *path)
{
    SCOPED_FD parent = open(path, O_PATH | O_CLOEXEC);
    struct landlock_path_beneath_attr rule = {.allowed_access = access, .parent_fd = parent};
    return parent < 0 ? -1 : (int)syscall(SYS_landlock_add_rule, ruleset, LANDLOCK_RULE_PATH_BENEATH, &rule, 0);
}

static int hide(const char *path, const char *empty)
{
    if (mount(empty, path, NULL, MS_BIND, NULL) < 0)
        return -1;
    return mount("none", path, NULL, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL);
}

/* Writes through a copy of the /proc mount alone: bwrap covers parts of it, /proc/sys among them. */
static int set_counter(const char *name, uint64_t value)
{
    char text[24];
    int size = snprintf(text, sizeof text, "%llu", (unsigned long long)value);
    SCOPED_FD tree = (int)syscall(SYS_open_tree, AT_FDCWD, "/proc", TREE_CLONE | TREE_CLOEXEC);
    if (tree < 0)
        return -1;
    SCOPED_FD dir = openat(tree, "sys/user", O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (dir < 0)
        return -1;
    SCOPED_FD fd = openat(dir, name, O_WRONLY | O_NOFOLLOW | O_CLOEXEC);
    return fd >= 0 && write(fd, text, (size_t)size) == size ? 0 : -1;
}

static int perform_step(const struct step *step, int index, struct built *built)
{
    static int ruleset = -1;
    const uint64_t *a = step->a;
    const char *const *d = step->data;
    switch ((enum op)step->op) {
    case OP_BIND: return attach(step, tree_fds[index]);
    case OP_ROOT: return make_root(d[0], d[1]);
    case OP_ENTER: return enter_root(a[0] != 0);
    case OP_MKDIR: return mkdir(d[0], (mode_t)a[0]);
    case OP_FILE: return make_file(d[0], (mode_t)a[0], d[1], step->len[1]);
    case OP_SYMLINK: return symlink(d[0], d[1]);
    case OP_TMPFS: return mount("tmpfs", d[0], "tmpfs", (unsigned long)a[0], d[1]);
    case OP_PROC: return mount("proc", d[0], "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL);
    case OP_DEVPTS: return mount("devpts", d[0], "devpts", MS_NOSUID | MS_NOEXEC, d[1]);
    case OP_REMOUNT: return mount("none", d[0], NULL, MS_REMOUNT | MS_BIND | (unsigned long)a[0], NULL);
    case OP_HOSTNAME: return sethostname(d[0], strlen(d[0]));
    case OP_NETLINK: return netlink((int)a[0], (int)a[1], d[0], step->len[0]);
    case OP_LISTEN:
        if (built->nlisteners == MAX_LISTENERS)
            break;
        built->listeners[built->nlisteners] = listener(step);
        return built->listeners[built->nlisteners++];
    case OP_SLOT:
        if (built->nslots == MAX_SLOTS)
            break;
        built->slots[built->nslots] = open(d[0], O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, (mode_t)a[0]);
        return built->slots[built->nslots++];
    case OP_LOCKDOWN: return lockdown((unsigned long)a[0]);
    case OP_LL_CREATE: {
        uint64_t attr[3] = {a[0], a[1], a[2]};
        if (a[3] > sizeof attr)
            break;
        return ruleset = (int)syscall(SYS_landlock_create_ruleset, attr, (size_t)a[3], 0);
    }
    case OP_LL_PATH: return allow_path(ruleset, a[0], d[0]);
    case OP_LL_RESTRICT: return (int)syscall(SYS_landlock_restrict_self, ruleset, (uint32_t)a[0]);
    case OP_SECCOMP: {
        struct sock_fprog program = {.len = (unsigned short)(step->len[0] / sizeof(struct sock_filter)),
                                     /* NOLINTNEXTLINE(performance-no-int-to-ptr): only read, although its type is not const */
                                     .filter = (struct sock_filter *)(uintptr_t)d[0]};
        return (int)syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program);
    }
    case OP_RLIMIT: {
        struct rlimit limit = {.rlim_cur = a[1], .rlim_max = a[2]};
        return setrlimit((int)a[0], &limit);
    }
    case OP_DETACH: return detach_root();
    case OP_IDENTITY: return check_identity(d[0], a[0], a[1], a[2] != 0);
    case OP_ATTRS: return add_attrs(d[0], a[0]);
    case OP_HIDE: return hide(d[0], d[1]);
    case OP_COUNTER: return set_counter(d[0], a[0]);
    case OP_RESIZE: return resize(d[0], (unsigned long)a[0], (mode_t)a[1], d[1]);
    case OP_SHARE:
        built->shares = 1;
        built->namespaces[0] = open("/proc/self/ns/user", O_RDONLY | O_CLOEXEC);
        return built->namespaces[0] < 0 ? -1 : (built->namespaces[1] = open("/proc/self/ns/mnt", O_RDONLY | O_CLOEXEC));
    case OP_SUBREAPER: return prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
    default: break;
    }
    errno = EINVAL;
    return -1;
}

int perform_steps(struct step *steps, int from, int n, struct built *built, uint32_t *failed_op)
{
    for (int i = from; i < n; i++)
        if (perform_step(&steps[i], i, built) < 0) {
            *failed_op = steps[i].op | (uint32_t)i << 8;
            return -1;
        }
    return 0;
}
