/* Time and memory of reading metadata: the whole, and one item of it.
 *
 *     bench_metadata FILE [FQN [RUNS]]
 *
 * Prints medians, with the file read through pread from the page cache, and the peak of memory of each kind in a process of its
 * own. bench/gen_metadata.py writes large files. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "format/metadata.h"

static dcp_status read_file(const dcp__source *self, uint64_t offset, void *buf, size_t n, dcp_error *err)
{
    for (size_t done = 0; done < n;) {
        ssize_t got = pread(*(const int *)self->user, (char *)buf + done, n - done, (off_t)(offset + done));
        if (got <= 0) {
            return dcp__fail(err, DCP_IO, "cannot read");
        }
        done += (size_t)got;
    }
    return DCP_OK;
}

static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static double run(const dcp__source *src, const dcp_str *only)
{
    dcp_error err = DCP_ERROR_INIT;
    dcp__metadata *md;
    double start = seconds();
    if (dcp__metadata_read(dcp__context(NULL), src, only, &md, &err) != DCP_OK) {
        fprintf(stderr, "%s at %llu\n", err.message, (unsigned long long)err.offset);
        exit(1);
    }
    double took = seconds() - start;
    dcp__metadata_free(md);
    return took;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

/* In a child, so that the peak of memory is that of one kind of reading. */
static void measure(const char *what, const dcp__source *src, const dcp_str *only, int runs)
{
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        struct rusage before, after;
        double *took = malloc((size_t)runs * sizeof *took);
        getrusage(RUSAGE_SELF, &before);
        for (int i = 0; took && i < runs; i++) {
            took[i] = run(src, only);
        }
        getrusage(RUSAGE_SELF, &after);
        qsort(took, (size_t)runs, sizeof *took, by_value);
        printf("%-8s median %.1f ms, best %.1f ms, peak %.1f MB above %.1f MB\n", what, took[runs / 2] * 1e3, took[0] * 1e3,
               (double)(after.ru_maxrss - before.ru_maxrss) / 1024, (double)before.ru_maxrss / 1024);
        free(took);
        exit(0);
    }
    waitpid(child, NULL, 0);
}

int main(int argc, char **argv)
{
    struct stat st;
    int fd = argc > 1 ? open(argv[1], O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0 || fstat(fd, &st) != 0) {
        fprintf(stderr, "usage: bench_metadata FILE [FQN [RUNS]]\n");
        return 2;
    }
    dcp__source src = {.read = read_file, .size = (uint64_t)st.st_size, .user = &fd};
    dcp_str only = dcp_str_of(argc > 2 ? argv[2] : "model.layers.500.mlp.weight");
    int runs = argc > 3 ? atoi(argv[3]) : 11;
    printf("%s: %.1f MB\n", argv[1], (double)src.size / 1e6);
    measure("whole", &src, NULL, runs > 0 ? runs : 1);
    measure("one", &src, &only, runs > 0 ? runs : 1);
    close(fd);
    return 0;
}
