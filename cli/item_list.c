#include "item_list.h"

#include "cli.h"
#include "escape.h"

#include <stdlib.h>
#include <string.h>

static int compare_str(dcp_str a, dcp_str b)
{
    size_t n = a.len < b.len ? a.len : b.len;
    int order = n ? memcmp(a.ptr, b.ptr, n) : 0;
    return order ? order : (a.len > b.len) - (a.len < b.len);
}

int item_compare(const dcp_item *a, const dcp_item *b)
{
    int order = compare_str(a->fqn, b->fqn);
    return order ? order : (a->rank > b->rank) - (a->rank < b->rank);
}

static int compare_names(const void *a, const void *b)
{
    return item_compare(*(const dcp_item *const *)a, *(const dcp_item *const *)b);
}

static int compare_keys(dcp_key a, dcp_key b)
{
    if (a.is_int != b.is_int) {
        return a.is_int ? -1 : 1;
    }
    return a.is_int ? (a.integer > b.integer) - (a.integer < b.integer) : compare_str(a.string, b.string);
}

bool item_key_equal(dcp_key a, dcp_key b)
{
    return compare_keys(a, b) == 0;
}

size_t item_path_len(const dcp_item *item)
{
    return item->path_len ? item->path_len : 1;
}

dcp_key item_path_key(const dcp_item *item, size_t i)
{
    if (item->path_len) {
        return item->path[i];
    }
    return (dcp_key){.string = item->fqn};
}

static int compare_paths(const void *a, const void *b)
{
    const dcp_item *x = *(const dcp_item *const *)a, *y = *(const dcp_item *const *)b;
    size_t nx = item_path_len(x), ny = item_path_len(y);
    for (size_t i = 0; i < nx && i < ny; i++) {
        int order = compare_keys(item_path_key(x, i), item_path_key(y, i));
        if (order) {
            return order;
        }
    }
    return nx == ny ? compare_names(a, b) : nx < ny ? -1 : 1;
}

static const dcp_item **sorted(const dcp_checkpoint *ck, size_t *n, int (*compare)(const void *, const void *))
{
    *n = dcp_checkpoint_count(ck);
    const dcp_item **items = must_alloc(*n, sizeof *items);
    for (size_t i = 0; i < *n; i++) {
        items[i] = dcp_checkpoint_item(ck, i);
    }
    qsort(items, *n, sizeof *items, compare);
    return items;
}

const dcp_item **item_list_by_name(const dcp_checkpoint *ck, size_t *n)
{
    return sorted(ck, n, compare_names);
}

const dcp_item **item_list_by_path(const dcp_checkpoint *ck, size_t *n)
{
    return sorted(ck, n, compare_paths);
}

const char *item_type_name(const dcp_item *item)
{
    return item->kind == DCP_ITEM_TENSOR ? dcp_dtype_name(item->dtype) : "object";
}

/* ---- by name ---- */

/* What a name stands for apart from one item. */
typedef struct near_misses {
    const dcp_item *printed_so; /* ls prints this item's name so */
    size_t n_ranks, n_below;    /* ranks that have one of their own; names that start with "name." */
} near_misses;

static bool is_below(dcp_str fqn, const char *name, size_t len)
{
    return fqn.len > len && fqn.ptr[len] == '.' && memcmp(fqn.ptr, name, len) == 0;
}

static near_misses look_around(const dcp_checkpoint *ck, const char *name, int rank)
{
    near_misses found = {0};
    size_t len = strlen(name);
    for (size_t i = 0; i < dcp_checkpoint_count(ck); i++) {
        const dcp_item *item = dcp_checkpoint_item(ck, i);
        char *printed = escape_text(item->fqn, ESCAPE_NAME);
        bool is_same = compare_str(item->fqn, dcp_str_of(name)) == 0;
        if (strcmp(printed, name) == 0 && !is_same && (rank < 0 || item->rank < 0 || item->rank == rank)) {
            found.printed_so = item;
        }
        free(printed);
        found.n_ranks += is_same && item->rank >= 0;
        found.n_below += is_below(item->fqn, name, len);
    }
    return found;
}

const dcp_item *item_list_find(const dcp_checkpoint *ck, const char *name, int rank)
{
    dcp_str fqn = dcp_str_of(name);
    const dcp_item *item = rank < 0 ? dcp_checkpoint_find(ck, fqn) : dcp_checkpoint_find_rank(ck, fqn, rank);
    if (item) {
        return item;
    }
    near_misses found = look_around(ck, name, rank);
    if (found.printed_so) {
        return found.printed_so;
    }
    if (found.n_ranks && rank < 0) {
        complain("%zu ranks have their own '%s': choose one with --rank", found.n_ranks, name);
    } else if (found.n_ranks) {
        complain("rank %d has no '%s'; %zu other rank%s", rank, name, found.n_ranks, found.n_ranks == 1 ? " has" : "s have");
    } else if (found.n_below) {
        complain("no item is named '%s'; %zu name%s with '%s.'", name, found.n_below, found.n_below == 1 ? " starts" : "s start",
                 name);
    } else {
        complain("no item is named '%s'", name);
    }
    return NULL;
}

/* ---- files ---- */

static int compare_texts(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* Drops repetitions from a sorted array. */
static size_t unique(const char **names, size_t n)
{
    size_t kept = 0;
    for (size_t i = 0; i < n; i++) {
        if (kept == 0 || strcmp(names[kept - 1], names[i]) != 0) {
            names[kept++] = names[i];
        }
    }
    return kept;
}

bool item_files(const dcp_checkpoint *ck, const dcp_item *item, const char ***out, size_t *n, dcp_error *err)
{
    const char **names = must_alloc(item->n_chunks, sizeof *names);
    size_t found = 0;
    for (size_t i = 0; i < item->n_chunks; i++) {
        dcp_chunk_info chunk;
        if (dcp_item_chunk(ck, item, i, &chunk, err) != DCP_OK) {
            free(names);
            return false;
        }
        if (chunk.file) {
            names[found++] = chunk.file;
        }
    }
    qsort(names, found, sizeof *names, compare_texts);
    *n = unique(names, found);
    *out = names;
    return true;
}

dcp_status item_repr(const dcp_item *item, const dcp_value *value, char **out, size_t *len, dcp_error *err)
{
    dcp_error cause = DCP_ERROR_INIT;
    dcp_status rc = dcp_value_repr(value, 0, out, len, &cause);
    if (rc != DCP_OK) {
        char *name = escape_text(item->fqn, ESCAPE_NAME);
        *err = cause;
        snprintf(err->message, sizeof err->message, "item \"%.200s\": %.700s", name, cause.message);
        free(name);
    }
    return rc;
}
