/* Which file of a Hugging Face directory each item of a rank goes to, and what the files are called. */
#ifndef DCP_ENGINE_HF_LAYOUT_H
#define DCP_ENGINE_HF_LAYOUT_H

#include "base/strmap.h"
#include "dcp/convert.h"
#include "plan/save_plan.h"

#define DCP__HF_NAME_BYTES 80
#define DCP__HF_MAX_FILES 999999999u /* that a name has digits for */

typedef struct dcp__hf_layout {
    dcp_context *ctx;
    bool is_whole;       /* of whole tensors, else of shards */
    int rank;            /* of this process */
    dcp__strmap by_name; /* -> number of the file that the caller has chosen */
    uint32_t highest;    /* of these numbers; 1 if the caller leaves the choice */
    bool has_places;
    uint32_t *number_of; /* [item] of its file, from 1 on; 0: another rank writes it */
    uint32_t copies;     /* parts of one name that this rank writes, at most; 0: it writes nothing */
    uint64_t parts;      /* that the names tell of */
} dcp__hf_layout;

/* Takes the caller's choice. Names are borrowed. Reset in every case. Errors: ARG, NOMEM. */
dcp_status dcp__hf_layout_init(dcp__hf_layout *l, dcp_context *ctx, const dcp_hf_save_opts *opts, int rank, dcp_error *err);
void dcp__hf_layout_reset(dcp__hf_layout *l);
/* Every item must be a tensor with a file; with is_whole also whole. Errors: ARG, UNSUPPORTED. */
dcp_status dcp__hf_layout_check(const dcp__hf_layout *l, const dcp_save_plan *plan, dcp_error *err);
/* Numbers the items that this rank writes: those of one name one after the other, since a file has each name once. */
dcp_status dcp__hf_layout_number(dcp__hf_layout *l, const dcp_save_plan *plan, const bool *writes, dcp_error *err);

/* What the other ranks have to know: one number, to be given back as all[rank]. */
uint64_t dcp__hf_layout_word(const dcp__hf_layout *l);
bool dcp__hf_layout_writes(uint64_t word);
/* Errors: MISMATCH (the ranks have been told different numbers of files), LIMIT. */
dcp_status dcp__hf_layout_agree(dcp__hf_layout *l, const uint64_t *all, int world, size_t n_items, dcp_error *err);

void dcp__hf_layout_name(const dcp__hf_layout *l, uint32_t number, char out[DCP__HF_NAME_BYTES]);

#endif
