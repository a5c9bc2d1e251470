/*
 * Runs a fuzzer's LLVMFuzzerTestOneInput once over each file given, or over each file in a directory given. Works with every
 * compiler, so that the corpus is a test everywhere.
 *
 * Exit status: 0 all inputs were run, 1 an input could not be read or there was none.
 */
#include <dirent.h>
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* A block of exactly the file's size, so that address sanitizers and valgrind see the first byte too far. */
static uint8_t *slurp(FILE *f, size_t size)
{
    uint8_t *data = malloc(size);
    if (data == NULL && size > 0) {
        return NULL;
    }
    if (size > 0 && fread(data, 1, size, f) != size) {
        free(data);
        return NULL;
    }
    return data;
}

static int replay_file(const char *path)
{
    struct stat st;
    FILE *f = fopen(path, "rb");
    if (f == NULL || fstat(fileno(f), &st) != 0) {
        fprintf(stderr, "%s: %s\n", path, strerror(errno));
        if (f != NULL) {
            fclose(f);
        }
        return -1;
    }
    size_t size = (size_t)st.st_size;
    uint8_t *data = slurp(f, size);
    fclose(f);
    if (data == NULL && size > 0) {
        fprintf(stderr, "%s: cannot read %zu bytes\n", path, size);
        return -1;
    }
    LLVMFuzzerTestOneInput(data, size);
    free(data);
    return 1;
}

static int is_visible(const struct dirent *entry)
{
    return entry->d_name[0] != '.';
}

/* In the order of names, so that a crash is at the same place in every run. */
static int replay_directory(const char *path)
{
    struct dirent **entries;
    int n = scandir(path, &entries, is_visible, alphasort);
    int done = 0;
    for (int i = 0; i < n; i++) {
        char file[4096];
        int len = snprintf(file, sizeof(file), "%s/%s", path, entries[i]->d_name);
        if (done >= 0 && (len < 0 || (size_t)len >= sizeof(file) || replay_file(file) < 0)) {
            done = -1;
        }
        done += done >= 0;
        free(entries[i]);
    }
    if (n >= 0) {
        free(entries);
    }
    return n < 0 ? -1 : done;
}

int main(int argc, char **argv)
{
    int total = 0;
    for (int i = 1; i < argc; i++) {
        struct stat st;
        if (stat(argv[i], &st) != 0) {
            fprintf(stderr, "%s: %s\n", argv[i], strerror(errno));
            return 1;
        }
        int n = S_ISDIR(st.st_mode) ? replay_directory(argv[i]) : replay_file(argv[i]);
        if (n < 0) {
            return 1;
        }
        total += n;
    }
    printf("%d inputs replayed\n", total);
    return total > 0 ? 0 : 1;
}
