/* Performs the steps of a plan inside a new set of namespaces.
 *
 * There are two passes. First every source of a bind is opened as a detached copy of its mount tree, while the caller's root
 * and ids are still in place; then the private root is entered and everything is attached there. So no step ever resolves a
 * name in a tree that sandboxed code could have changed. */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
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
#include <sys/statvfs.h>
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

#ifndef SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV
#define SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV (1UL << 5)
#endif

enum { TREE_CLONE = 1, TREE_CLOEXEC = O_CLOEXEC, AT_TREE_RECURSIVE = 0x8000, MOVE_F_EMPTY_PATH = 4, MOUNT_IDMAP = 0x100000 };

/* Constants of struct open_how and of struct statx (an index of 64-bit words): their headers clash with the C library's. */
enum { NO_SYMLINKS = 4, STATX_ATTRIBUTES = 1, STATX_MOUNT_ROOT = 0x2000, STATX_MOUNT = 0x1000, STATX_MOUNT_WORD = 18 };

struct attr { uint64_t set, clear, propagation, userns_fd; };

int tree_fds[MAX_STEPS];
int caller_proc = -1;

static int check_source(int fd, const struct step *step)
{
    struct stat st;
    if (fstat(fd, &st) < 0)
        return -1;
    if (!step->a[2] || (st.st_dev == step->a[1] && st.st_ino == step->a[2]))
        return 0;
    errno = ESTALE; /* another directory has replaced the session's */
    return -1;
}

static int open_classic(const struct step *step, const int *fds, int source, int idmap)
{
    if (idmap >= 0) {
        errno = ENOSYS;
        return -1;
    }
    SCOPED_FD fd = source >= 0 ? fcntl(fds[source], F_DUPFD_CLOEXEC, 3) : open(step->data[0], O_PATH | O_CLOEXEC);
    return fd < 0 || check_source(fd, step) < 0 ? -1 : take_fd(&fd);
}

int open_source(const struct step *step, const int *fds, int nfds)
{
    int source, idmap;
    if (bind_refs(step, nfds, &source, &idmap) < 0) {
        errno = EBADF;
        return -1;
    }
    if (step->a[0] & BIND_CLASSIC)
        return open_classic(step, fds, source, idmap);
    SCOPED_FD tree = (int)syscall(SYS_open_tree, source >= 0 ? fds[source] : AT_FDCWD, source >= 0 ? "" : step->data[0],
                            TREE_CLONE | TREE_CLOEXEC | AT_TREE_RECURSIVE | (source >= 0 ? AT_EMPTY_PATH : 0));
    if (tree < 0)
        return -1;
    struct attr attr = {.set = step->a[0] & ~BIND_EXISTING, .propagation = MS_PRIVATE};
    if (idmap >= 0) {
        attr.set |= MOUNT_IDMAP;
        attr.userns_fd = (uint64_t)fds[idmap];
    }
    if (check_source(tree, step) < 0)
        return -1;
    if (syscall(SYS_mount_setattr, tree, "", AT_EMPTY_PATH | AT_TREE_RECURSIVE, &attr, sizeof attr) < 0)
        return -1;
    return take_fd(&tree);
}

static int open_attached(const struct step *step, const int *fds, int nfds)
{
    if (step->a[0] > (uint64_t)nfds) {
        errno = EBADF;
        return -1;
    }
    return fcntl(fds[step->a[0] - 1], F_DUPFD_CLOEXEC, 3);
}

/* Opens the sources of all binds that are (or are not) id-mapped. */
int open_sources(struct step *steps, int n, const int *fds, int nfds, int idmapped)
{
    for (int i = 0; i < n; i++) {
        if (steps[i].op == OP_ATTACH && steps[i].a[0] && !idmapped && (tree_fds[i] = open_attached(&steps[i], fds, nfds)) < 0)
            return -1;
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

/* Adds flags to one mount. A mount that a user namespace has inherited keeps the flags that restrict it, and the kernel
 * refuses a remount without them. */
static int restrict_mount(const char *path, unsigned long flags)
{
    struct statvfs st;
    if (statvfs(path, &st) < 0)
        return -1;
    flags |= st.f_flag & (MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC); /* the same bits */
    return mount("none", path, NULL, MS_REMOUNT | MS_BIND | flags, NULL);
}

/* Binds what a descriptor refers to, by its name in the caller's /proc: no path of the new root is resolved. */
static int bind_descriptor(int fd, const char *target, unsigned long flags)
{
    char name[16];
    snprintf(name, sizeof name, "%d", fd);
    SCOPED_FD names = openat(caller_proc, "self/fd", O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (names < 0 || fchdir(names) < 0)
        return -1;
    int bound = mount(name, target, NULL, MS_BIND | MS_REC, NULL), error = errno;
    if (chdir("/") < 0)
        return -1;
    errno = error;
    return bound < 0 ? -1 : restrict_mount(target, flags);
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
    SCOPED_FD source = tree;
    if (step->a[0] & BIND_CLASSIC)
        return bind_descriptor(source, step->data[1], (unsigned long)(step->a[0] & ~(BIND_EXISTING | BIND_CLASSIC)));
    return (int)syscall(SYS_move_mount, source, "", AT_FDCWD, step->data[1], MOVE_F_EMPTY_PATH);
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

static int mount_of(int fd, uint64_t *id)
{
    uint64_t about[32] = {0};
    if (syscall(SYS_statx, fd, "", AT_EMPTY_PATH, STATX_MOUNT, about) < 0)
        return -1;
    if (!((uint32_t)about[0] & STATX_MOUNT)) {
        errno = ENOSYS;
        return -1;
    }
    *id = about[STATX_MOUNT_WORD];
    return 0;
}

/* Without openat2 (gVisor): opens one component after the other. A mount point belongs to another mount than its parent. */
static int open_mounted_by_walk(const char *path)
{
    SCOPED_FD at = open("/", O_PATH | O_DIRECTORY | O_CLOEXEC);
    uint64_t mount = 0, above = 0;
    for (const char *end; at >= 0 && *path; path = end) {
        char name[NAME_MAX + 1];
        struct stat st;
        path += strspn(path, "/");
        end = path + strcspn(path, "/");
        if (end == path)
            break;
        if (end - path > NAME_MAX) {
            errno = ENAMETOOLONG;
            return -1;
        }
        memcpy(name, path, (size_t)(end - path));
        name[end - path] = 0;
        if (mount_of(at, &above) < 0)
            return -1;
        int below = openat(at, name, O_PATH | O_NOFOLLOW | O_CLOEXEC);
        close(at);
        at = below;
        if (at < 0 || fstat(at, &st) < 0 || mount_of(at, &mount) < 0)
            return -1;
        if (S_ISLNK(st.st_mode)) {
            errno = ELOOP;
            return -1;
        }
    }
    if (at >= 0 && mount == above) {
        errno = ESTALE;
        return -1;
    }
    return take_fd(&at);
}

static int open_mounted(const char *path)
{
    uint64_t how[3] = {O_PATH | O_CLOEXEC, 0, NO_SYMLINKS}, about[32] = {0};
    SCOPED_FD fd = (int)syscall(SYS_openat2, AT_FDCWD, path, how, sizeof how);
    if (fd < 0)
        return errno == ENOSYS ? open_mounted_by_walk(path) : -1;
    if (syscall(SYS_statx, fd, "", AT_EMPTY_PATH, 0, about) < 0)
        return -1;
    if (about[STATX_ATTRIBUTES] & STATX_MOUNT_ROOT)
        return take_fd(&fd);
    errno = ESTALE;
    return -1;
}

/* With `mounted`, no component of the path may be a link, and the path must be a mount point: a mount in a directory that
 * others write is lost when they replace the directory, and ends up elsewhere when they put a link in its way. */
static int check_identity(const char *path, uint64_t device, uint64_t inode, int mounted)
{
    struct stat st;
    SCOPED_FD fd = mounted ? open_mounted(path) : open(path, O_PATH | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &st) < 0)
        return -1;
    if (st.st_dev == device && st.st_ino == inode)
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

static int clear_capabilities(void)
{
    if (prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0) < 0)
        return -1;
    struct __user_cap_header_struct head = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct none[2];
    memset(none, 0, sizeof none);
    if (syscall(SYS_capset, &head, none) < 0)
        return -1;
    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
}

static int lockdown(unsigned long securebits)
{
    if (securebits && prctl(PR_SET_SECUREBITS, securebits, 0, 0, 0) < 0)
        return -1;
    unsigned long cap = 0;
    while (prctl(PR_CAPBSET_DROP, cap, 0, 0, 0) == 0)
        cap++;
    if (cap == 0 || errno != EINVAL) /* the first capability that this kernel does not support */
        return -1;
    return clear_capabilities();
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

/* Sets an option that acts on the whole network namespace. */
static int set_option(const struct step *step)
{
    SCOPED_FD fd = socket((int)step->a[0], (int)step->a[1] | SOCK_CLOEXEC, (int)step->a[2]);
    if (fd < 0)
        return -1;
    return setsockopt(fd, (int)(step->a[3] >> 32), (int)(uint32_t)step->a[3], step->data[0], (socklen_t)step->len[0]);
}

static int allow_path(int ruleset, uint64_t access, const char *path, uint64_t device, uint64_t inode)
{
    SCOPED_FD parent = open(path, O_PATH | O_CLOEXEC);
    struct landlock_path_beneath_attr rule = {.allowed_access = access, .parent_fd = parent};
    struct stat st;
    if (parent >= 0 && inode && (fstat(parent, &st) < 0 || st.st_dev != device || st.st_ino != inode)) {
        errno = ESTALE; /* another file has replaced the session's */
        return -1;
    }
    return parent < 0 ? -1 : (int)syscall(SYS_landlock_add_rule, ruleset, LANDLOCK_RULE_PATH_BENEATH, &rule, 0);
}

static int install_filter(const struct step *step, unsigned int flags)
{
    struct sock_fprog program = {.len = (unsigned short)(step->len[0] / sizeof(struct sock_filter)),
                                 /* NOLINTNEXTLINE(performance-no-int-to-ptr): only read, although its type is not const */
                                 .filter = (struct sock_filter *)(uintptr_t)step->data[0]};
    return (int)syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, flags, &program);
}

static int cover(const char *path, const char *file)
{
    if (mount(file, path, NULL, MS_BIND, NULL) < 0)
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

/* The descriptors that others need to begin with these mounts, or to join all namespaces. */
static int open_shared(struct built *built, int all)
{
    static const char *const names[NJOINED + 1] = {
        [JOIN_USER] = "/proc/self/ns/user", [JOIN_MOUNT] = "/proc/self/ns/mnt", [JOIN_PID] = "/proc/self/ns/pid",
        [JOIN_IPC] = "/proc/self/ns/ipc", [JOIN_UTS] = "/proc/self/ns/uts", [JOIN_CGROUP] = "/proc/self/ns/cgroup",
        [NJOINED] = "/proc"};
    for (int n = all ? NJOINED + 1 : JOIN_MOUNT + 1; built->nshared < n; built->nshared++) {
        const char *name = names[built->nshared];
        int fd = open(name, O_RDONLY | O_CLOEXEC);
        if (fd < 0 && errno == ENOENT && caller_proc >= 0) /* a root without /proc */
            fd = openat(caller_proc, name + sizeof "/proc", O_RDONLY | O_CLOEXEC);
        if ((built->shared[built->nshared] = fd) < 0)
            return -1;
    }
    return 0;
}

static int perform_step(const struct step *step, int index, struct built *built)
{
    static int ruleset = -1, layers = -1;
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
    case OP_REMOUNT: return restrict_mount(d[0], (unsigned long)a[0]);
    case OP_HOSTNAME: return sethostname(d[0], strlen(d[0]));
    case OP_NETLINK: return netlink((int)a[0], (int)a[1], d[0], step->len[0]);
    case OP_SOCKOPT: return set_option(step);
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
    case OP_LL_PATH: return allow_path(ruleset, a[0], d[0], a[1], a[2]);
    case OP_LL_RESTRICT: return (int)syscall(SYS_landlock_restrict_self, ruleset, (uint32_t)a[0]);
    case OP_SECCOMP: return install_filter(step, 0);
    case OP_MEDIATE:
        built->mediate = step;
        /* A call that the runner has received is interrupted by fatal signals alone, so it is never performed twice. */
        return built->notify = install_filter(step, SECCOMP_FILTER_FLAG_NEW_LISTENER | SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV);
    case OP_TERMINAL: return built->has_terminal = open_terminal(built->terminal) == 0 ? 1 : -1;
    case OP_UNPRIVILEGED: return clear_capabilities();
    case OP_NICE: return setpriority(PRIO_PROCESS, 0, getpriority(PRIO_PROCESS, 0) + (int)a[0]);
    case OP_RLIMIT: {
        struct rlimit limit = {.rlim_cur = a[1], .rlim_max = a[2]};
        return setrlimit((int)a[0], &limit);
    }
    case OP_DETACH: return detach_root();
    case OP_IDENTITY: return check_identity(d[0], a[0], a[1], a[2] != 0);
    case OP_ATTRS: return add_attrs(d[0], a[0]);
    case OP_COVER: return cover(d[0], d[1]);
    case OP_COUNTER: return set_counter(d[0], a[0]);
    case OP_RESIZE: return resize(d[0], (unsigned long)a[0], (mode_t)a[1], d[1]);
    case OP_SHARE: return open_shared(built, a[0] != 0);
    case OP_LAYERS: return layers = make_layers(step);
    case OP_ATTACH: return attach_tree(a[0] ? tree_fds[index] : layers, d[0]);
    case OP_TREE: return share_tree(built, d[0]);
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
