/* Write barriers of one process, seen from inside: loaded with LD_PRELOAD into a producer or a broker.

   A power cut keeps what was synced, and of the rest any part. So every fsync, fdatasync and msync of a file below
   LOSSTEST_DISK_ROOT leaves a copy of its contents in LOSSTEST_DISK_SHADOW before it returns, and the names in its
   directory, as journaling file systems do. The supervisor builds from these what a cut could leave. Files there:

     content-INODE   what the file held at its last sync
     names-INODE     the entries of a directory at that time, one per line: inode, blank, name, with a NUL at the end
     held-INODE      a hard link that keeps the inode from being used again
     control         u32: microseconds that each write and sync takes longer; written by the supervisor

   Programs that call the kernel without the C library (those in Go) are not seen. */

#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

static char root[PATH_MAX], shadow[PATH_MAX - 64];
static volatile uint32_t *delay_us;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* Read the environment; called when a program starts, and by a forked worker when it knows what it is. */
EXPORT __attribute__((constructor)) void losstest_disk_setup(void) {
    const char *where = getenv("LOSSTEST_DISK_ROOT"), *keep = getenv("LOSSTEST_DISK_SHADOW");
    char path[PATH_MAX];
    if (!where || !keep || strlen(where) >= sizeof root || strlen(keep) >= sizeof shadow)
        return;
    strcpy(root, where);
    strcpy(shadow, keep);
    snprintf(path, sizeof path, "%s/control", shadow);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return;
    void *at = mmap(NULL, sizeof(uint32_t), PROT_READ, MAP_SHARED, fd, 0);
    syscall(SYS_close, fd);
    delay_us = at == MAP_FAILED ? NULL : at;
}

/* The path of an open file, if it lies below the root. */
static int watched(int fd, char *path) {
    char link[64];
    if (!delay_us)
        return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, PATH_MAX - 1);
    size_t length = strlen(root);
    if (n < (ssize_t)length)
        return 0;
    path[n] = 0;
    return strncmp(path, root, length) == 0 && (path[length] == '/' || path[length] == 0);
}

static void hold(const char *path, uint64_t inode) {
    char held[PATH_MAX];
    snprintf(held, sizeof held, "%s/held-%" PRIu64, shadow, inode);
    if (link(path, held)) { /* there already, or a directory */
    }
}

static FILE *begin(char *temporary) {
    snprintf(temporary, PATH_MAX, "%s/new-%ld", shadow, (long)syscall(SYS_gettid));
    return fopen(temporary, "we");
}

static void finish(FILE *out, const char *temporary, const char *kind, uint64_t inode) {
    char target[PATH_MAX];
    snprintf(target, sizeof target, "%s/%s-%" PRIu64, shadow, kind, inode);
    int failed = ferror(out);
    if (fclose(out) || failed || rename(temporary, target))
        unlink(temporary);
}

static void keep_names(const char *path) {
    char temporary[PATH_MAX], entry_path[PATH_MAX + 256];
    struct stat found;
    DIR *directory = opendir(path);
    if (!directory)
        return;
    FILE *out = fstat(dirfd(directory), &found) ? NULL : begin(temporary);
    for (struct dirent *entry; out && (entry = readdir(directory));) {
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, ".."))
            continue;
        snprintf(entry_path, sizeof entry_path, "%s/%s", path, entry->d_name);
        hold(entry_path, entry->d_ino);
        fprintf(out, "%" PRIu64 " %s", (uint64_t)entry->d_ino, entry->d_name);
        fputc(0, out);
    }
    closedir(directory);
    if (out)
        finish(out, temporary, "names", found.st_ino);
}

static void keep_contents(const char *path, uint64_t inode) {
    char temporary[PATH_MAX], block[65536];
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return;
    FILE *out = begin(temporary);
    if (out) {
        for (ssize_t n; (n = read(fd, block, sizeof block)) > 0;)
            fwrite(block, 1, n, out);
        finish(out, temporary, "content", inode);
    }
    syscall(SYS_close, fd);
    hold(path, inode);
}

/* What a sync of this file or directory makes durable. */
static void keep(char *path) {
    struct stat found;
    int before = errno;
    if (stat(path, &found) == 0) {
        pthread_mutex_lock(&lock);
        if (S_ISREG(found.st_mode))
            keep_contents(path, found.st_ino);
        else if (S_ISDIR(found.st_mode))
            keep_names(path);
        size_t length = strlen(root);
        while (strlen(path) > length) { /* and the directories that lead to it */
            *strrchr(path, '/') = 0;
            keep_names(path);
        }
        pthread_mutex_unlock(&lock);
    }
    errno = before;
}

static void wait_for_disk(int fd) {
    char path[PATH_MAX];
    if (delay_us && *delay_us && watched(fd, path))
        usleep(*delay_us);
}

#define REAL(name) \
    static __typeof__(&name) real; \
    if (!real) \
        real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

#define SYNC(name) \
    EXPORT int name(int fd) { \
        REAL(name); \
        char path[PATH_MAX]; \
        if (watched(fd, path)) \
            keep(path); \
        wait_for_disk(fd); \
        return real(fd); \
    }
SYNC(fsync)
SYNC(fdatasync)

EXPORT int msync(void *address, size_t length, int flags) {
    REAL(msync);
    FILE *maps = delay_us ? fopen("/proc/self/maps", "re") : NULL;
    if (maps) {
        char line[PATH_MAX + 128], path[PATH_MAX];
        unsigned long first, last;
        while (fgets(line, sizeof line, maps)) {
            path[0] = 0;
            if (sscanf(line, "%lx-%lx %*s %*s %*s %*s %4095[^\n]", &first, &last, path) < 2)
                continue;
            if ((unsigned long)address >= first && (unsigned long)address < last) {
                size_t n = strlen(root);
                if (!strncmp(path, root, n) && path[n] == '/') {
                    keep(path);
                    usleep(*delay_us);
                }
                break;
            }
        }
        fclose(maps);
    }
    return real(address, length, flags);
}

#define WRITE(name, parameters, arguments) \
    EXPORT ssize_t name parameters { \
        REAL(name); \
        if (delay_us && *delay_us) \
            wait_for_disk(fd); \
        return real arguments; \
    }
WRITE(write, (int fd, const void *data, size_t size), (fd, data, size))
WRITE(pwrite, (int fd, const void *data, size_t size, off_t at), (fd, data, size, at))
WRITE(pwrite64, (int fd, const void *data, size_t size, off64_t at), (fd, data, size, at))
WRITE(writev, (int fd, const struct iovec *parts, int count), (fd, parts, count))
WRITE(pwritev, (int fd, const struct iovec *parts, int count, off_t at), (fd, parts, count, at))
WRITE(pwritev64, (int fd, const struct iovec *parts, int count, off64_t at), (fd, parts, count, at))

/* The build makes Python modules; this one is never imported. */
EXPORT void *PyInit__disk(void) { return NULL; }
