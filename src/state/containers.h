/* What flattening loses: empty dicts, ordered dicts, integer keys. Kept beside the leaves, it makes the rebuilt tree the saved
 * one. */
#ifndef DCP_STATE_CONTAINERS_H
#define DCP_STATE_CONTAINERS_H

#include "base/error.h"
#include "dcp/state.h"

/* A fact about what stands at a path. Paths have text keys only, as those of leaves. kind is one of
 *   "dict"          an empty dict stands here
 *   "ordered_dict"  the dict here is an ordered one
 *   "int_key"       the last key of the path is an integer in the dict
 * An empty ordered dict has "dict" and then "ordered_dict". The root has the empty path. */
typedef struct dcp__container {
    const dcp_key *path;
    size_t path_len;
    dcp_str kind;
    size_t before; /* leaves of the tree that come before it; SIZE_MAX: not known */
} dcp__container;

/* dcp_flatten for trees that are there already, and cannot be told to choose other keys: of leaves with one name the first in
 * order keeps it, the others get the first of name#2, name#3, ... that is no leaf's name by the rule, and stand under it at the
 * root. */
dcp_status dcp__flatten_any(dcp_context *ctx, dcp_value *root, dcp_flatten_rule rule, dcp_flat **out, dcp_error *err);

/* Those that dcp_flatten came across, outer ones first. Owned by flat. */
const dcp__container *dcp__flat_containers(const dcp_flat *flat, size_t *n);

/* The key under which a dict has what a leaf's path calls `key`: that, or the integer that it spells. */
dcp_key dcp__stored_key(const dcp_value *dict, dcp_key key);

/* Applies facts to a rebuilt tree; a fact whose path is not there, or of an unknown kind, is passed over. The tree is changed in
 * place and must not be shared. Errors: NOMEM. "dict" is left to the caller, who adds empty dicts as leaves. */
dcp_status dcp__restore_containers(dcp_value *root, const dcp__container *containers, size_t n, dcp_error *err);

#endif
