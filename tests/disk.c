/* Preloaded, it makes a disk that has no locks, that can't sync its directories, or at whose
   nth change, of those below a directory, the process is killed: before it, or halfway through. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <unistd.h>

static long left = -1;          /* changes until the kill; below 0: there is none */
static long count = 0;
static int noted = -1;
static char below[PATH_MAX];

void disk_kill_at(long nth, const char *directory, int note) {
    realpath(directory, below);
    left = nth;
    count = 0;
    noted = note;
}

static int is_below(const char *path) {
    return strncmp(path, below, strlen(below)) == 0;
}

static int is_watched(int fd, const char *path) {
    char link[64], full[PATH_MAX];
    if (left < 0) return 0;
    if (path) {
        if (path[0] == '/') return is_below(path);
        if (!getcwd(full, sizeof full)) return 0;
        strncat(full, "/", sizeof full - strlen(full) - 1);
        strncat(full, path, sizeof full - strlen(full) - 1);
        return is_below(full);
    }
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, full, sizeof full - 1);
    if (size < 0) return 0;
    full[size] = 0;
    return is_below(full);
}

/* Whether this is the change to die at. */
static int is_due(const char *what, int fd, const char *path) {
    if (!is_watched(fd, path)) return 0;
    /* By one operation: another thread's change may come before the comparison below. */
    long number = __atomic_add_fetch(&count, 1, __ATOMIC_SEQ_CST);
    if (noted >= 0) {
        char full[PATH_MAX] = "", link[64];
        if (!path) { snprintf(link, sizeof link, "/proc/self/fd/%d", fd); readlink(link, full, sizeof full - 1); path = full; }
        dprintf(noted, "%ld %s %s\n", number, what, path);
    }
    return left > 0 && number == left;
}

static void die(void) { kill(getpid(), SIGKILL); pause(); }

#define REAL(name) static __typeof__(&name) real; if (!real) real = dlsym(RTLD_NEXT, #name)
#define CHANGES(type, name, parameters, arguments, fd, path) \
    type name parameters { REAL(name); if (is_due(#name, fd, path)) die(); return real arguments; }

ssize_t write(int fd, const void *data, size_t size) {
    REAL(write);
    if (is_due("write", fd, NULL)) { real(fd, data, size / 2); die(); }
    return real(fd, data, size);
}

static int refused(const char *name, int is_so, int number) {
    if (is_so && getenv(name)) { errno = number; return 1; }
    return 0;
}

int fsync(int fd) {
    REAL(fsync);
    struct stat found;
    if (refused("NO_DIRECTORY_SYNC", !fstat(fd, &found) && S_ISDIR(found.st_mode), EINVAL)) return -1;
    if (is_due("fsync", fd, NULL)) die();
    return real(fd);
}

#define OPENS(name) \
    int name(const char *path, int flags, ...) { \
        REAL(name); \
        va_list rest; va_start(rest, flags); int mode = va_arg(rest, int); va_end(rest); \
        if ((flags & (O_CREAT | O_TRUNC)) && is_due(#name, -1, path)) die(); \
        return real(path, flags, mode); \
    }
OPENS(open)
OPENS(open64)

#define LOCKS(name) \
    int name(int fd, int command, ...) { \
        REAL(name); \
        va_list rest; va_start(rest, command); void *what = va_arg(rest, void *); va_end(rest); \
        if (refused("NO_LOCKS", command == F_SETLK || command == F_SETLKW, ENOLCK)) return -1; \
        return real(fd, command, what); \
    }
LOCKS(fcntl)
LOCKS(fcntl64)

CHANGES(int, rename, (const char *from, const char *to), (from, to), -1, to)
CHANGES(int, renameat, (int d, const char *from, int e, const char *to), (d, from, e, to), -1, to)
CHANGES(int, unlink, (const char *path), (path), -1, path)
CHANGES(int, unlinkat, (int d, const char *path, int flags), (d, path, flags), -1, path)
CHANGES(int, mkdir, (const char *path, mode_t mode), (path, mode), -1, path)
CHANGES(ssize_t, sendfile, (int to, int from, off_t *at, size_t size), (to, from, at, size), to, NULL)
CHANGES(ssize_t, sendfile64, (int to, int from, off64_t *at, size_t size), (to, from, at, size), to, NULL)
CHANGES(int, rmdir, (const char *path), (path), -1, path)
CHANGES(int, truncate, (const char *path, off_t size), (path, size), -1, path)
CHANGES(int, truncate64, (const char *path, off64_t size), (path, size), -1, path)
CHANGES(int, ftruncate, (int fd, off_t size), (fd, size), fd, NULL)
CHANGES(int, ftruncate64, (int fd, off64_t size), (fd, size), fd, NULL)
