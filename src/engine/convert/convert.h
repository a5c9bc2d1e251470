/* A conversion: what is to be written, where its elements come from, and how files are made of them. */
#ifndef DCP_ENGINE_CONVERT_H
#define DCP_ENGINE_CONVERT_H

#include "dcp/convert.h"
#include "engine/convert/convert_names.h"
#include "engine/save/copy.h"
#include "format/pickle_writer.h"

#define DCP_MAX_CONVERT_RANKS 4096

/* One item of the output. */
typedef struct dcp__cv_item {
    const dcp__entry *entry; /* where it comes from */
    dcp_item_kind kind;
    dcp_str fqn;
    const dcp_key *path;
    size_t path_len;
    dcp_dtype dtype; /* tensors, as written, and so are the next two */
    int ndim;
    const int64_t *extents;
    const dcp_quantized *quantized; /* what it is made of; NULL: the elements are the source's */
    uint64_t elems;                 /* tensors */
    uint64_t bytes;                 /* tensors, as written */
    uint64_t tie;                   /* equal for the same elements of the source; 0: there can be no other */
    size_t same_as;    /* the item whose elements these are: itself, or an earlier one of equal tie, dtype and shape */
    dcp_value *object; /* objects */
} dcp__cv_item;

/* Are the elements other ones than the source's? */
static inline bool dcp__cv_is_changed(const dcp__cv_item *item)
{
    return item->quantized || (item->kind == DCP_ITEM_TENSOR && item->dtype != item->entry->item.dtype);
}

typedef struct dcp__conversion {
    dcp_context *ctx;
    dcp_checkpoint *ck;
    const dcp_convert_opts *opts;
    dcp_storage *storage; /* of the output */
    dcp__edits edits;
    dcp_convert_report report;
    dcp__step step;       /* comm NULL: alone */
    pthread_mutex_t lock; /* guards what follows, the report's counts of casts, and the caller's progress function */
    uint64_t done_bytes, total_bytes;
} dcp__conversion;

/* A CRC of the source that its segments will tell. */
typedef struct dcp__cv_crc {
    uint32_t expected;
    bool is_summed;
} dcp__cv_crc;

/* The items of one output. */
typedef struct dcp__selection {
    dcp__conversion *c;
    dcp_save_plan *names; /* owns texts, paths and objects */
    dcp__cv_item *items;
    size_t n;
    dcp__container *containers;
    size_t n_containers;
    dcp__cv_crc *crcs; /* [chunk of the source] */
} dcp__selection;

/* ---- convert_select.c ---- */

/* Items of part number `part` (SIZE_MAX: there are none), selected, renamed, cast, aliases handled as the form wants. Errors: as
 * dcp_convert. */
dcp_status dcp__cv_select(dcp__conversion *c, size_t part, dcp__selection *out, dcp_error *err);
void dcp__selection_reset(dcp__selection *s);
/* Every pattern of the options must match something. Errors: NOT_FOUND. */
dcp_status dcp__cv_check_patterns(const dcp__conversion *c, dcp_error *err);

/* ---- convert_views.c: sources that are torch.save files ---- */

/* Where a tensor lies in its storage. */
typedef struct dcp__cv_extent {
    int64_t storage, begin, end; /* bytes */
    size_t item;
    bool is_row_major;
} dcp__cv_extent;

/* All tensors with elements, by storage, then begin, then with the largest first, and of equal ones with the row-major ones
 * first. Free *out in every case. */
dcp_status dcp__cv_list_extents(const dcp__selection *s, dcp__cv_extent **out, size_t *n, dcp_error *err);

/* An item as a view of another one: elements from `offset` on of the row-major ones of `base`, with dcp__cv_strides. */
typedef struct dcp__cv_view {
    size_t base;    /* the item itself: it is no view of another one */
    int64_t offset; /* elements */
} dcp__cv_view;

/* views[item]: whatever lies within a row-major tensor of the selection is a view of it. Other sources have none. */
dcp_status dcp__cv_find_views(const dcp__selection *s, dcp__cv_view *views, dcp_error *err);
/* Of a view, in the source. */
const int64_t *dcp__cv_strides(const dcp__selection *s, size_t item);

/* ---- convert_stream.c: elements ---- */

/* A run of elements of one item, row-major in the whole tensor, read and written at once. */
typedef struct dcp__cv_segment {
    uint32_t item, chunk; /* chunk: which of the source, DCP__NO_CHUNK if it is of several */
    uint64_t start;       /* first element in the tensor */
    uint64_t n;
    uint32_t crc;        /* of the elements as written */
    uint32_t source_crc; /* as read */
    dcp__digest digest;  /* as written */
} dcp__cv_segment;

#define DCP__NO_CHUNK UINT32_MAX

/* Cuts an item into segments of at most DCP__CV_SEGMENT_BYTES and appends them. */
#define DCP__CV_SEGMENT_BYTES ((size_t)8 << 20)

typedef struct dcp__segments {
    dcp_context *ctx;
    dcp__cv_segment *list;
    size_t n, cap;
} dcp__segments;

dcp_status dcp__cv_cut(const dcp__selection *s, size_t item, dcp__segments *out, dcp_error *err);

/* Buffers of one worker. */
typedef struct dcp__cv_buffers {
    uint8_t *in, *out; /* equal if nothing is cast */
    dcp__hasher *hasher;
} dcp__cv_buffers;

dcp_status dcp__cv_buffers_create(const dcp__selection *s, int n, dcp__cv_buffers **out, dcp_error *err);
void dcp__cv_buffers_free(dcp_context *ctx, dcp__cv_buffers *b, int n);

/* Reads a segment into b->out, cast, and fills in the CRCs and the digest. Numbers that do not fit are counted, or MISMATCH. */
dcp_status dcp__cv_read(const dcp__selection *s, dcp__cv_segment *segment, const dcp__cv_buffers *b, dcp_error *err);
/* Before the elements of an item are read: the CRCs of the source are compared, but for those that segments will tell if these
 * are to be summed. */
dcp_status dcp__cv_check_source(const dcp__selection *s, const dcp__cv_item *item, bool is_summed, dcp_error *err);
/* After the last one: those that they do tell. segments are those of one item. */
dcp_status dcp__cv_check_crcs(const dcp__selection *s, const dcp__cv_segment *segments, size_t n, dcp_error *err);
/* Counts bytes as done; CANCELED if the caller wants no more. From any thread. */
dcp_status dcp__cv_advance(dcp__conversion *c, uint64_t bytes, dcp_error *err);
/* Counts elements that were cast. MISMATCH if any were lost and that is not allowed; the caller says of which item. */
dcp_status dcp__cv_count_cast(dcp__conversion *c, const dcp__cv_item *item, const dcp__cv_segment *segment, uint64_t lost,
                              dcp_error *err);
/* Tells the caller how far it is; false cancels. */
bool dcp__cv_tell(dcp__conversion *c, uint64_t done_bytes);
/* Reads elements [start, start + n) of a tensor in row-major order. */
dcp_status dcp__cv_read_elems(dcp_checkpoint *ck, const dcp_item *item, uint64_t start, uint64_t n, void *buf, dcp_error *err);
/* Reads the same elements of the output and compares their digest: CHECKSUM if it is another one. */
dcp_status dcp__cv_read_back(const dcp__cv_segment *segment, dcp_checkpoint *made, const dcp_item *item, const dcp__cv_buffers *b,
                             dcp_error *err);

/* ---- convert_file.c: one file of the output ---- */

/* Where an item's elements stand in the file. */
typedef struct dcp__cv_place {
    size_t item; /* of the selection */
    uint64_t offset;
    size_t storage; /* torch */
} dcp__cv_place;

#define DCP__CV_TEMPORARY ".libdcp-part" /* behind the name of a file that is not complete */

typedef struct dcp__cv_file {
    const dcp__selection *s;
    const char *name;            /* in the storage */
    dcp_convert_form form;       /* TORCH or SAFETENSORS */
    const dcp__cv_place *places; /* of tensors, in order of offset */
    size_t n_places;
    const dcp__buf *header;              /* safetensors: what is in front of the tensors */
    struct dcp__archive_layout *archive; /* torch */
    const dcp__write_storage *storages;  /* torch, [storage]: those of objects have their elements in memory */
    size_t n_storages;
    uint64_t bytes;  /* of the whole file */
    int workers;     /* threads that may make it; 0: as many as dcp__cv_threads says */
    bool is_written; /* under its temporary name, which is ours until it is published or discarded */
    dcp_file *held;  /* what keeps others from that name; NULL: nothing */
} dcp__cv_file;

/* Threads for which there are buffers. */
int dcp__cv_threads(const dcp_context *ctx);
/* Writes the file under a temporary name, and reads it back unless the options say no. *was_kept: with `resume` a file of that
 * name was there and holds what it should. On an error the temporary file is removed. */
dcp_status dcp__cv_write_file(dcp__cv_file *f, bool *was_kept, dcp_error *err);
/* Gives a written file its name. */
dcp_status dcp__cv_publish_file(dcp__cv_file *f, dcp_error *err);
dcp_status dcp__cv_fail_busy(dcp_error *err);
/* Closes what is held. */
void dcp__cv_release_file(dcp__cv_file *f);
/* Removes the temporary file of one that was written and not published, and nobody else's. */
void dcp__cv_discard_file(dcp__cv_file *f);

/* Puts the name of a file of a directory in front of an error. */
dcp_status dcp__cv_in_file(const dcp__conversion *c, const char *name, dcp_status status, dcp_error *err);
/* EXISTS if a file is there and may not be replaced. */
dcp_status dcp__cv_check_absent(const dcp__conversion *c, const char *name, dcp_error *err);
/* NOSPACE if the storage has less than so many bytes left for the files of a directory. */
dcp_status dcp__cv_check_space(const dcp__conversion *c, const char *dir, uint64_t bytes, dcp_error *err);
/* A small file with these bytes, under a temporary name first. */
dcp_status dcp__cv_put_file(const dcp__conversion *c, const char *name, const void *bytes, size_t n, dcp_error *err);

/* ---- one file for each form ---- */

dcp_status dcp__cv_to_torch(dcp__selection *s, const char *to, dcp_error *err);
dcp_status dcp__cv_to_safetensors(dcp__selection *s, const char *to, dcp_error *err);
dcp_status dcp__cv_to_hf(dcp__selection *s, const char *to, dcp_error *err);
dcp_status dcp__cv_to_dcp(dcp__selection *s, const char *to, dcp_error *err);

#endif
