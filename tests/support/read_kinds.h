/* The kinds of records that a load of several ranks reads in ways of their own. */
#ifndef TESTS_SUPPORT_READ_KINDS_H
#define TESTS_SUPPORT_READ_KINDS_H

#include "support/spread.h"

typedef struct read_kind {
    const char *name;
    const char *transform;
    bool check_crc;
} read_kind;

enum { READ_KINDS = 4 };

static const read_kind read_kinds[READ_KINDS] = {
    {"plain", NULL, false}, {"zstd", "stream.zstd/1", false}, {"crc", NULL, true}, {"zstd and crc", "stream.zstd/1", true}};

/* Saves tensors in memory, with the kind's records. */
static inline dcp_storage *save_kind(const read_kind *kind, const spread *tensors, size_t n, int ranks)
{
    rank_thread threads[TEST_MAX_RANKS];
    spread_job j = {tensors, n, NULL, "", DCP_SAVE_OPTS_INIT};
    assert_int_equal(dcp_storage_memory(NULL, &j.storage, NULL), DCP_OK);
    j.save.transform = kind->transform;
    run_ranks(ranks, spread_save_rank, &j, threads);
    spread_expect(threads, ranks, DCP_OK, kind->name);
    return j.storage;
}

/* Its metadata and its data files. */
static inline uint64_t bytes_of_checkpoint(dcp_storage *st)
{
    dcp_open_opts opts = DCP_OPEN_OPTS_INIT;
    dcp_checkpoint *ck;
    dcp_checkpoint_info info = DCP_CHECKPOINT_INFO_INIT;
    opts.storage = st;
    assert_int_equal(dcp_checkpoint_open(NULL, "", &opts, &ck, NULL), DCP_OK);
    assert_int_equal(dcp_checkpoint_get_info(ck, &info, NULL), DCP_OK);
    uint64_t bytes = info.metadata_bytes;
    for (size_t i = 0; i < info.n_files; i++) {
        dcp_file_info f;
        assert_int_equal(dcp_checkpoint_file(ck, i, &f, NULL), DCP_OK);
        bytes += f.bytes;
    }
    dcp_checkpoint_close(ck);
    return bytes;
}

#endif
