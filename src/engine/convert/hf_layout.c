#include "engine/convert/hf_layout.h"

#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "state/strided.h"

/* ---- the caller's choice ---- */

static dcp_status add_place(dcp__hf_layout *l, const dcp_hf_place *p, dcp_error *err)
{
    uint64_t other;
    if (p->file < 1 || p->file > DCP__HF_MAX_FILES) {
        return dcp__fail(err, DCP_ARG, "tensor \"%s\" is to go to file %u: they are numbered from 1 to %u",
                         dcp__print(p->fqn).text, p->file, DCP__HF_MAX_FILES);
    }
    dcp_status status = dcp__strmap_add(&l->by_name, p->fqn, p->file, &other, err);
    if (status == DCP_OK && other != UINT64_MAX && other != p->file) {
        return dcp__fail(err, DCP_ARG, "tensor \"%s\" is to go to file %u and to file %u", dcp__print(p->fqn).text,
                         (unsigned)other, p->file);
    }
    l->highest = p->file > l->highest ? p->file : l->highest;
    return status;
}

dcp_status dcp__hf_layout_init(dcp__hf_layout *l, dcp_context *ctx, const dcp_hf_save_opts *opts, int rank, dcp_error *err)
{
    dcp_status status = DCP_OK;
    *l = (dcp__hf_layout){.ctx = ctx, .is_whole = opts->whole, .rank = rank, .highest = 1, .has_places = opts->places != NULL};
    dcp__strmap_init(&l->by_name, ctx);
    for (size_t i = 0; l->has_places && i < opts->n_places && status == DCP_OK; i++) {
        status = add_place(l, &opts->places[i], err);
    }
    return status;
}

void dcp__hf_layout_reset(dcp__hf_layout *l)
{
    if (l->ctx) {
        dcp__strmap_reset(&l->by_name);
        dcp__free(l->ctx, l->number_of);
    }
    *l = (dcp__hf_layout){0};
}

static dcp_status check_item(const dcp__hf_layout *l, const dcp_write_item *item, dcp_error *err)
{
    uint64_t file;
    if (item->kind == DCP_ITEM_OBJECT) {
        return dcp__fail(err, DCP_UNSUPPORTED, "item \"%s\" is no tensor, which this form cannot hold",
                         dcp__print(item->fqn).text);
    }
    if (l->has_places && !dcp__strmap_get(&l->by_name, item->fqn, &file)) {
        return dcp__fail(err, DCP_ARG, "no file is chosen for tensor \"%s\", which the mapping does not name",
                         dcp__print(item->fqn).text);
    }
    size_t bytes = (size_t)item->ndim * sizeof *item->global_extents;
    if (l->is_whole && bytes && memcmp(item->box.sizes, item->global_extents, bytes) != 0) {
        return dcp__fail(err, DCP_ARG, "tensor \"%s\": this rank has %s of %s, and whole tensors are to be saved",
                         dcp__print(item->fqn).text, dcp__print_shape(item->ndim, item->box.sizes).text,
                         dcp__print_shape(item->ndim, item->global_extents).text);
    }
    return DCP_OK;
}

dcp_status dcp__hf_layout_check(const dcp__hf_layout *l, const dcp_save_plan *plan, dcp_error *err)
{
    dcp_status status = DCP_OK;
    for (size_t i = 0; i < plan->n && status == DCP_OK; i++) {
        status = check_item(l, &plan->items[i], err);
    }
    return status;
}

/* ---- numbers ---- */

static uint32_t place_of(const dcp__hf_layout *l, dcp_str fqn)
{
    uint64_t file = 1;
    dcp__strmap_get(&l->by_name, fqn, &file);
    return (uint32_t)file;
}

/* Part number `copy` of a name, from 0 on. */
static dcp_status number_item(dcp__hf_layout *l, size_t i, dcp_str fqn, uint32_t copy, dcp_error *err)
{
    uint64_t number = place_of(l, fqn) + (uint64_t)copy * l->highest;
    if (number > DCP__HF_MAX_FILES) {
        return dcp__fail(err, DCP_LIMIT, "tensor \"%s\": part %u goes to file %llu, and %u are possible", dcp__print(fqn).text,
                         copy + 1, (unsigned long long)number, DCP__HF_MAX_FILES);
    }
    l->number_of[i] = (uint32_t)number;
    l->copies = copy + 1 > l->copies ? copy + 1 : l->copies;
    return DCP_OK;
}

dcp_status dcp__hf_layout_number(dcp__hf_layout *l, const dcp_save_plan *plan, const bool *writes, dcp_error *err)
{
    dcp__strmap names;
    uint32_t *counts = dcp__calloc(l->ctx, plan->n, sizeof *counts); /* [first item of a name] */
    l->number_of = dcp__calloc(l->ctx, plan->n, sizeof *l->number_of);
    dcp_status status = counts && l->number_of ? DCP_OK : dcp__nomem(err);
    dcp__strmap_init(&names, l->ctx);
    for (size_t i = 0; i < plan->n && status == DCP_OK; i++) {
        uint64_t first;
        if (!writes[i]) {
            continue;
        }
        status = dcp__strmap_add(&names, plan->items[i].fqn, i, &first, err);
        if (status == DCP_OK) {
            first = first == UINT64_MAX ? i : first;
            status = number_item(l, i, plan->items[i].fqn, counts[first]++, err);
        }
    }
    dcp__strmap_reset(&names);
    dcp__free(l->ctx, counts);
    return status;
}

/* ---- together ---- */

uint64_t dcp__hf_layout_word(const dcp__hf_layout *l)
{
    return (uint64_t)l->highest << 32 | l->copies;
}

static uint32_t highest_in(uint64_t word)
{
    return (uint32_t)(word >> 32);
}

static uint32_t copies_in(uint64_t word)
{
    return (uint32_t)word;
}

bool dcp__hf_layout_writes(uint64_t word)
{
    return copies_in(word) > 0;
}

static dcp_status count_parts(dcp__hf_layout *l, const uint64_t *all, int world, dcp_error *err)
{
    uint64_t copies = 1;
    for (int r = 0; r < world; r++) {
        if (highest_in(all[r]) != l->highest) {
            return dcp__fail(err, DCP_MISMATCH, "rank %d is to make %u files, rank %d %u: the ranks have different mappings",
                             l->rank, l->highest, r, highest_in(all[r]));
        }
        copies = copies_in(all[r]) > copies ? copies_in(all[r]) : copies;
    }
    l->parts = copies * l->highest;
    return l->parts <= DCP__HF_MAX_FILES ? DCP_OK : dcp__fail(err, DCP_LIMIT, "%llu files", (unsigned long long)l->parts);
}

/* Whole tensors of several ranks, where the caller leaves the choice: each rank that has some makes one file. */
static void deal_files(dcp__hf_layout *l, const uint64_t *all, int world, size_t n_items)
{
    uint32_t own = 0;
    l->parts = 0;
    for (int r = 0; r < world; r++) {
        l->parts += dcp__hf_layout_writes(all[r]);
        own = r == l->rank ? (uint32_t)l->parts : own;
    }
    for (size_t i = 0; i < n_items; i++) {
        l->number_of[i] = l->number_of[i] ? own : 0;
    }
}

dcp_status dcp__hf_layout_agree(dcp__hf_layout *l, const uint64_t *all, int world, size_t n_items, dcp_error *err)
{
    dcp_status status = count_parts(l, all, world, err);
    if (status == DCP_OK && l->is_whole && !l->has_places) {
        deal_files(l, all, world, n_items);
    }
    return status;
}

void dcp__hf_layout_name(const dcp__hf_layout *l, uint32_t number, char out[DCP__HF_NAME_BYTES])
{
    int used = l->is_whole ? 0 : snprintf(out, DCP__HF_NAME_BYTES, "shard-%05d-", l->rank + 1);
    snprintf(out + used, DCP__HF_NAME_BYTES - (size_t)used, "model-%05u-of-%05llu.safetensors", number,
             (unsigned long long)l->parts);
}
