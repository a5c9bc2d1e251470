/* damage.h - what a damaged checkpoint must lead to, through the library and through dcptool.
 *
 * A test makes a good checkpoint in a directory, remembers its values, puts one defect in, and says what is to come of it.
 * Checked are status, file, item and offset of the failures, that whatever still reads has its old value, that memory and time
 * stay in proportion to the files, and that the tool fails where it must and prints nothing that looks whole. */
#ifndef TESTS_CORRUPT_DAMAGE_H
#define TESTS_CORRUPT_DAMAGE_H

#include "dcp/dcp.h"
#include "support/memory_copy.h"
#include "support/temp_dir.h"

/* An offset that is there but does not matter. */
#define ANY_OFFSET (UINT64_MAX - 1)

/* ---- memory ---- */

/* Counts what an allocator gives out. */
typedef struct meter {
    int64_t live, peak;
    dcp_context *ctx; /* on top of it, one thread */
} meter;

void meter_start(meter *m);
/* Ends the context; nothing may be left allocated. */
void meter_stop(meter *m);

/* ---- values ---- */

typedef struct value {
    char *fqn;
    int rank;
    dcp_dtype dtype; /* 0: an object */
    int ndim;
    int64_t extents[DCP_MAX_NDIM];
    char *bytes; /* elements, or repr */
    size_t n;
} value;

typedef struct values {
    value *list;
    size_t n;
} values;

/* Reads all items of a good checkpoint. st NULL: a path of the file system. */
values values_of(dcp_storage *st, const char *path);
void values_free(values *v);
/* Reads one item; the result is filled on DCP_OK only. */
dcp_status value_read(dcp_context *ctx, dcp_checkpoint *ck, const dcp_item *item, value *out, dcp_error *err);
void value_free(value *v);
bool value_equal(const value *a, const value *b);
const value *values_find(const values *v, const char *fqn, int rank);

/* ---- places ---- */

/* A directory with a checkpoint, and the storage that it is changed through. */
typedef struct place {
    temp_dir dir;
    dcp_storage *st;
} place;

void place_make(place *p);
void place_remove(place *p);
/* Bytes of all files. */
uint64_t place_bytes(const place *p);

/* ---- outcomes ---- */

/* What is to come of a defect. Statuses that are zero: that step succeeds. */
typedef struct outcome {
    dcp_status open;     /* of dcp_checkpoint_open; then nothing below it matters but file, at */
    dcp_status read;     /* of reading `item`; of all items if there is none */
    dcp_status verify;   /* code of the defect that dcp_verify finds */
    const char *file;    /* named by the failure; NULL: none */
    const char *item;    /* that cannot be read or has another value, or that verify names; several as "a,b"; NULL: none */
    uint64_t at;         /* offset in the file, of open and of verify */
    uint64_t read_at;    /* and of reading */
    bool is_quick;       /* verify --quick finds it too */
    bool allows_outside; /* it is opened that way */
    bool breaks_info;    /* the file cannot even be looked up */
    bool is_shape;       /* it is the metadata that contradicts itself: reading names no file */
} outcome;

/* Ends a test: fails it if any of its checks failed. */
void assert_no_failures(void);
/* Opens path (below p's directory; "" is itself) and checks everything. before: the values of the good checkpoint. */
void check_outcome(const place *p, const char *path, const values *before, const char *name, const outcome *want);

#endif
