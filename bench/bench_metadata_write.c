/* Time of writing metadata, and of taking records from their template.
 *
 *     bench_metadata_write [TENSORS [CHUNKS [RUNS]]]
 *
 * The metadata has TENSORS tensors of CHUNKS chunks each, one file for each chunk number: 1000 and 256 unless given otherwise. */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "format/metadata_writer.h"
#include "format/record_cache.h"

#define N_RECORDS 100000

static double milliseconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

static void *need(void *p)
{
    if (!p) {
        fprintf(stderr, "out of memory\n");
        exit(1);
    }
    return p;
}

static dcp_str named(dcp__arena *arena, const char *fmt, size_t i)
{
    char text[80];
    dcp_str s = {text, (size_t)snprintf(text, sizeof text, fmt, i)};
    s = dcp__arena_str(arena, s);
    need((void *)(uintptr_t)s.ptr);
    return s;
}

static void make_tensor(dcp__metadata *m, size_t t, size_t n_tensors, size_t n_chunks)
{
    dcp_key *path = need(dcp__arena_alloc(&m->arena, 2 * sizeof *path));
    int64_t *numbers = need(dcp__arena_alloc(&m->arena, (2 * n_chunks + 4) * sizeof *numbers));
    dcp__entry *e = &m->entries[t];
    path[0] = dcp_key_str("model");
    path[1] = (dcp_key){false, 0, named(&m->arena, "layers.%zu.self_attn.q_proj.weight", t)};
    *e = (dcp__entry){.first_chunk = t * n_chunks};
    e->item = (dcp_item){.fqn = named(&m->arena, "model.layers.%zu.self_attn.q_proj.weight", t),
                         .kind = DCP_ITEM_TENSOR,
                         .dtype = DCP_BFLOAT16,
                         .ndim = 2,
                         .extents = numbers,
                         .n_chunks = n_chunks,
                         .path = path,
                         .path_len = 2};
    numbers[0] = (int64_t)n_chunks * 8;
    numbers[2] = 8;
    numbers[1] = numbers[3] = 16;
    for (size_t c = 0; c < n_chunks; c++) {
        int64_t *offsets = numbers + 4 + 2 * c;
        offsets[0] = (int64_t)c * 8;
        offsets[1] = 0;
        m->chunks[t * n_chunks + c] = (dcp__chunk){offsets, numbers + 2, (uint32_t)(c * n_tensors + t)};
        m->storages[c * n_tensors + t] = (dcp__storage){.offset = t * 1833, .length = 1833, .file = (uint32_t)c};
    }
}

static dcp__metadata *make(size_t n_tensors, size_t n_chunks)
{
    dcp_context *ctx = dcp__context(NULL);
    dcp__metadata *m;
    if (dcp__metadata_create(ctx, &m, NULL) != DCP_OK) {
        need(NULL);
    }
    m->n_entries = n_tensors;
    m->n_chunks = m->n_storages = n_tensors * n_chunks;
    m->n_files = n_chunks;
    m->entries = need(dcp__calloc(ctx, n_tensors, sizeof *m->entries));
    m->chunks = need(dcp__calloc(ctx, m->n_chunks, sizeof *m->chunks));
    m->storages = need(dcp__calloc(ctx, m->n_storages, sizeof *m->storages));
    m->files = need(dcp__calloc(ctx, n_chunks, sizeof *m->files));
    for (size_t c = 0; c < n_chunks; c++) {
        m->files[c] = named(&m->arena, "__%zu_0.distcp", c);
    }
    for (size_t t = 0; t < n_tensors; t++) {
        make_tensor(m, t, n_tensors, n_chunks);
    }
    return m;
}

static void write_metadata(const dcp__metadata *m)
{
    static const dcp__metadata_write_opts opts = {201, true};
    dcp_error err = DCP_ERROR_INIT;
    dcp__buf out;
    dcp__buf_init(&out, m->ctx);
    double start = milliseconds();
    if (dcp__metadata_write(m, &opts, &out, &err) != DCP_OK) {
        fprintf(stderr, "%s\n", err.message);
        exit(1);
    }
    printf("metadata of %zu tensors, %zu chunks: %.1f ms, %.2f MB\n", m->n_entries, m->n_chunks, milliseconds() - start,
           (double)out.len / 1e6);
    dcp__buf_reset(&out);
}

/* Head and tail of records of 1 KiB, all of one shape or of one each. */
static void make_records(bool same_shape)
{
    static const dcp__archive_opts opts = {"archive", false, DCP__ARCHIVE_ALIGNMENT};
    static uint8_t out[4096];
    dcp__record_cache *cache;
    const dcp__archive_layout *l;
    if (dcp__record_cache_create(dcp__context(NULL), &opts, 256, &cache, NULL) != DCP_OK) {
        need(NULL);
    }
    double start = milliseconds();
    for (uint32_t i = 0; i < N_RECORDS; i++) {
        int64_t extents[] = {256 + (same_shape ? 0 : i)};
        if (dcp__record_cache_get(cache, DCP_FLOAT32, 1, extents, &l, NULL) != DCP_OK) {
            need(NULL);
        }
        dcp__archive_piece(l, 0, &i, out);
        dcp__archive_piece(l, 1, &i, out + 1024);
    }
    printf("records of %s: %.0f ns each\n", same_shape ? "one shape" : "distinct shapes",
           (milliseconds() - start) * 1e6 / N_RECORDS);
    dcp__record_cache_free(cache);
}

static size_t argument(int argc, char **argv, int i, size_t otherwise)
{
    size_t n = i < argc ? strtoul(argv[i], NULL, 10) : otherwise;
    return n ? n : otherwise;
}

int main(int argc, char **argv)
{
    dcp__metadata *m = make(argument(argc, argv, 1, 1000), argument(argc, argv, 2, 256));
    for (size_t run = argument(argc, argv, 3, 5); run > 0; run--) {
        write_metadata(m);
    }
    dcp__metadata_free(m);
    make_records(true);
    make_records(false);
    return 0;
}
