// Counts, logs and disturbs the calls that change files below one folder. Preloaded by bench/faults.py.
//
// gcc -shared -fPIC -O1 -o faults.so faults.c -ldl
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum Kind { NONE, NO_SPACE, IO_ERROR, KILL_BEFORE, KILL_AFTER, KILL_HALFWAY, STOP };

static char folder[PATH_MAX];
static int at = -1, kind = NONE, log_fd = -1;
static volatile int count = 0;

// Begin to count the calls below `where`, and disturb number `number` as `what`; the log goes to `descriptor`.
void faults_start(const char *where, int number, int what, int descriptor) {
    snprintf(folder, sizeof folder, "%s", where);
    count = 0, at = number, kind = what, log_fd = descriptor;
}
int faults_count(void) { return count; }

static int below(const char *path) {
    size_t n = strlen(folder);
    return n && strncmp(path, folder, n) == 0 && (path[n] == '/' || path[n] == 0);
}

// Write the absolute path of `path` below the open folder `dir` to `out`.
static void absolute(int dir, const char *path, char *out) {
    char link[64], base[PATH_MAX];
    if (path[0] == '/') { snprintf(out, PATH_MAX, "%s", path); return; }
    if (dir == AT_FDCWD) snprintf(link, sizeof link, "/proc/self/cwd");
    else snprintf(link, sizeof link, "/proc/self/fd/%d", dir);
    ssize_t n = readlink(link, base, sizeof base - 1);
    base[n < 0 ? 0 : n] = 0;
    snprintf(out, PATH_MAX, "%.2000s%s%.2000s", base, path[0] ? "/" : "", path);
}
static void of_descriptor(int fd, char *out) { absolute(fd, "", out); }

static ssize_t (*real_write)(int, const void *, size_t);

// Log a call, and its bytes, as "name<TAB>path<TAB>other<TAB>offset<TAB>n<LF>" and n bytes.
static void note(const char *name, const char *path, const char *other, long offset, const void *data, size_t n) {
    char line[2 * PATH_MAX + 100];
    if (log_fd < 0) return;
    int size = snprintf(line, sizeof line, "%s\t%s\t%s\t%ld\t%zu\n", name, path, other, offset, n);
    real_write(log_fd, line, size);
    if (n) real_write(log_fd, data, n);
}

// Say what becomes of the next call: 0 it is made, -1 it fails with errno, 1 it is made by half, then death.
static int next_call(void) {
    int mine = __sync_fetch_and_add(&count, 1);
    if (mine != at) return 0;
    if (kind == NO_SPACE || kind == IO_ERROR) { errno = kind == NO_SPACE ? ENOSPC : EIO; return -1; }
    if (kind == KILL_BEFORE) kill(getpid(), SIGKILL);
    if (kind == STOP) raise(SIGSTOP);
    return kind == KILL_AFTER ? 2 : kind == KILL_HALFWAY ? 1 : 0;
}
static void after(int what) { if (what > 0) kill(getpid(), SIGKILL); }

#define REAL(name) ({ static __typeof__(name) *f; if (!f) f = dlsym(RTLD_NEXT, #name); f; })

ssize_t write(int fd, const void *data, size_t n) {
    if (!real_write) real_write = dlsym(RTLD_NEXT, "write");
    char path[PATH_MAX];
    struct stat st;
    if (!folder[0] || fd == log_fd || (of_descriptor(fd, path), !below(path)) || fstat(fd, &st) || !S_ISREG(st.st_mode))
        return real_write(fd, data, n);
    int what = next_call();
    if (what < 0) return -1;
    long offset = fcntl(fd, F_GETFL) & O_APPEND ? st.st_size : lseek(fd, 0, SEEK_CUR);
    ssize_t done = real_write(fd, data, what == 1 ? n / 2 : n);
    if (done > 0) note("write", path, "", offset, data, done);
    after(what);
    return done;
}
#define CHANGE(name, path, other, call) ({                                                  \
    int what = next_call(), result = what < 0 ? -1 : what == 1 ? 0 : (call);                 \
    if (what >= 0 && result == 0) note(name, path, other, 0, "", 0);                         \
    if (what >= 0) after(what);                                                              \
    result; })

static int sync_of(const char *name, int fd, int (*real)(int)) {
    char path[PATH_MAX];
    of_descriptor(fd, path);
    if (!below(path)) return real(fd);
    return CHANGE(name, path, "", real(fd));
}
int fsync(int fd) { return sync_of("fsync", fd, REAL(fsync)); }
int fdatasync(int fd) { return sync_of("fsync", fd, REAL(fdatasync)); }

static int rename_between(int from_dir, const char *from, int to_dir, const char *to) {
    __typeof__(renameat) *real = REAL(renameat);
    char a[PATH_MAX], b[PATH_MAX];
    absolute(from_dir, from, a), absolute(to_dir, to, b);
    if (!below(a) && !below(b)) return real(from_dir, from, to_dir, to);
    return CHANGE("rename", a, b, real(from_dir, from, to_dir, to));
}
int rename(const char *from, const char *to) { return rename_between(AT_FDCWD, from, AT_FDCWD, to); }
int renameat(int i, const char *from, int j, const char *to) { return rename_between(i, from, j, to); }

int mkdirat(int dir, const char *name, mode_t mode) {
    __typeof__(mkdirat) *real = REAL(mkdirat);
    char path[PATH_MAX];
    absolute(dir, name, path);
    if (!below(path) || access(path, F_OK) == 0) return real(dir, name, mode);
    return CHANGE("mkdir", path, "", real(dir, name, mode));
}
int mkdir(const char *name, mode_t mode) { return mkdirat(AT_FDCWD, name, mode); }

int unlinkat(int dir, const char *name, int flags) {
    __typeof__(unlinkat) *real = REAL(unlinkat);
    char path[PATH_MAX];
    absolute(dir, name, path);
    if (!below(path)) return real(dir, name, flags);
    return CHANGE("unlink", path, "", real(dir, name, flags));
}
int unlink(const char *name) { return unlinkat(AT_FDCWD, name, 0); }
int rmdir(const char *name) { return unlinkat(AT_FDCWD, name, AT_REMOVEDIR); }

int ftruncate(int fd, off_t size) {
    __typeof__(ftruncate) *real = REAL(ftruncate);
    char path[PATH_MAX];
    of_descriptor(fd, path);
    if (!below(path)) return real(fd, size);
    int what = next_call();
    if (what < 0) return -1;
    int result = what == 1 ? 0 : real(fd, size);
    if (result == 0) note("truncate", path, "", size, "", 0);
    after(what);
    return result;
}
int ftruncate64(int fd, off_t size) { return ftruncate(fd, size); }

static int open_at(int dir, const char *name, int flags, mode_t mode) {
    static int (*real)(int, const char *, int, ...);
    if (!real) real = dlsym(RTLD_NEXT, "openat");
    char path[PATH_MAX];
    absolute(dir, name, path);
    int makes = (flags & O_CREAT) && below(path) && faccessat(dir, name, F_OK, AT_SYMLINK_NOFOLLOW);
    int empties = (flags & O_TRUNC) && below(path);
    if (kind == STOP && below(path)) next_call();  // a race may be lost at a read, too
    else if (!makes && !empties) return real(dir, name, flags, mode);
    if (kind == STOP) return real(dir, name, flags, mode);
    int what = next_call();
    if (what < 0) return -1;
    int fd = what == 1 ? -1 : real(dir, name, flags, mode);
    if (fd >= 0) note(makes ? "create" : "truncate", path, "", 0, "", 0);
    after(what);
    return fd;
}
#define MODE(flags) ({ va_list rest; va_start(rest, flags); mode_t m = (flags) & O_CREAT ? va_arg(rest, mode_t) : 0; \
                       va_end(rest); m; })
int open(const char *name, int flags, ...) { return open_at(AT_FDCWD, name, flags, MODE(flags)); }
int open64(const char *name, int flags, ...) { return open_at(AT_FDCWD, name, flags, MODE(flags)); }
int openat(int dir, const char *name, int flags, ...) { return open_at(dir, name, flags, MODE(flags)); }
int openat64(int dir, const char *name, int flags, ...) { return open_at(dir, name, flags, MODE(flags)); }
