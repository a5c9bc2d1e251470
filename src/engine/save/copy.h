/* A checkpoint as the source of a save: what copy, merge and reshard share. */
#ifndef DCP_ENGINE_COPY_H
#define DCP_ENGINE_COPY_H

#include "engine/read/checkpoint.h"
#include "engine/save/session.h"
#include "plan/save_plan.h"

/* Opens a checkpoint whose CRCs are compared while it is copied. Elements of a torch.save file must be read by way of
 * dcp__origin, or be compared before: then a storage with many views is looked at once. */
dcp_status dcp__open_origin(dcp_context *ctx, const char *path, const dcp_open_opts *given, dcp_checkpoint **out, dcp_error *err);
/* The same number for chunks that are the same elements: of one record, or one view of a storage of a torch.save file; 0 if there
 * can be no other. */
dcp_status dcp__tie_of(dcp_checkpoint *ck, const dcp__entry *e, const dcp__chunk *c, uint64_t *tie, dcp_error *err);
/* The same for all elements of entries that lie in equal chunks. */
dcp_status dcp__tie_of_entry(dcp_checkpoint *ck, const dcp__entry *e, uint64_t *tie, dcp_error *err);
/* Reads n row-major bytes of a write item's box, from byte `offset` on. */
dcp_status dcp__read_item_bytes(dcp_checkpoint *ck, const dcp__entry *e, const dcp_write_item *item, uint64_t offset, void *buf,
                                size_t n, dcp_error *err);
/* Who compares the CRC of a torch.save file's storage asks this before: true if another has done so, or does, whose failure is
 * that of the whole copy. Of other checkpoints and checkpoints that were opened otherwise: false. */
bool dcp__mark_compared(dcp_checkpoint *ck, const dcp__entry *e);
/* What one chunk is read from, front to back. */
typedef struct dcp__origin {
    dcp_checkpoint *ck;
    const dcp__entry *entry;
    const dcp__chunk *chunk;
    /* The rest is found out with the first of several blocks. */
    bool is_plain;   /* the file holds the elements row-major from `offset` on */
    bool is_summed;  /* the blocks give the record's CRC */
    uint64_t offset; /* in the file */
    uint32_t crc, expected;
    uint64_t crc_at; /* where in the file the CRC's bytes begin; DCP_NO_OFFSET: not stored as such */
} dcp__origin;
/* The pull function of a write item that is a chunk: user is a dcp__origin. Blocks are asked for in ascending order, from the
 * first to the last; the CRC is compared with the last one if the checkpoint is open for that. */
dcp_status dcp__origin_pull(void *user, const dcp_write_item *item, uint64_t offset, void *buf, size_t n, dcp_error *err);
/* The same without taking the CRC: for who takes that of all blocks anyway, and compares it after the last. */
dcp_status dcp__origin_read(dcp__origin *from, const dcp_write_item *item, uint64_t offset, void *buf, size_t n, dcp_error *err);
dcp_status dcp__origin_compare(const dcp__origin *from, uint32_t crc, dcp_error *err);
/* The object of an item, in a form that a save takes: values that cannot be written anew as the record that they are, whose bytes
 * are the plan's. */
dcp_status dcp__read_for_copy(dcp_checkpoint *ck, dcp_save_plan *p, const dcp_item *item, dcp_value **out, dcp_error *err);
/* Adds entry `index` to a plan, under "rank.<rank>." if rank >= 0. */
dcp_status dcp__plan_add_entry(dcp_checkpoint *ck, dcp_save_plan *p, size_t index, int rank, dcp_error *err);
/* Adds the chunks of a tensor, called as `name` says. */
dcp_status dcp__plan_add_tensor(dcp_checkpoint *ck, dcp_save_plan *p, const dcp__entry *e, const dcp_write_item *name,
                                dcp_error *err);
/* What flattening lost of the source, as far as it tells. */
const dcp__container *dcp__containers_of(const dcp_checkpoint *ck, size_t *n);
/* What the metadata says beside its items: containers, and fields that are not known here. */
dcp_status dcp__plan_add_own_facts(const dcp_checkpoint *ck, dcp_save_plan *p, dcp_error *err);

/* Saves a plan, from begin to commit, on a rank that may have failed already: `mine` and *err. gate: see dcp_save_session. */
dcp_status dcp__save_planned(dcp_context *ctx, const char *to, const dcp_save_opts *opts, dcp_status mine,
                             const dcp_save_plan *plan, dcp__gate *gate, dcp_save_report *report, dcp_error *err);

#endif
