/* One storage in memory for all tests of a program: make_storage and free_storage are for cmocka_run_group_tests. */
#ifndef TESTS_SUPPORT_MEMORY_STORE_H
#define TESTS_SUPPORT_MEMORY_STORE_H

#include "dcp/dcp.h"

static dcp_storage *storage;

static inline int make_storage(void **state)
{
    (void)state;
    return dcp_storage_memory(NULL, &storage, NULL) == DCP_OK ? 0 : -1;
}

static inline int free_storage(void **state)
{
    (void)state;
    dcp_storage_free(storage);
    return 0;
}

static inline dcp_checkpoint *reopen(const char *path)
{
    dcp_open_opts opts = DCP_OPEN_OPTS_INIT;
    dcp_checkpoint *ck = NULL;
    dcp_error err = DCP_ERROR_INIT;
    opts.storage = storage;
    if (dcp_checkpoint_open(NULL, path, &opts, &ck, &err) != DCP_OK) {
        fail_msg("%s", err.message);
    }
    return ck;
}

#endif
