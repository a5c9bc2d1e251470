/* item_list.h - the items of a checkpoint: sorted, found by name, and the files they lie in. */
#ifndef DCP_CLI_ITEM_LIST_H
#define DCP_CLI_ITEM_LIST_H

#include <dcp/dcp.h>

/* Order by bytes of the names, then by rank. */
int item_compare(const dcp_item *a, const dcp_item *b);

/* All items in that order. Freed with free. */
const dcp_item **item_list_by_name(const dcp_checkpoint *ck, size_t *n);
/* The same, by their place in the tree; list positions as numbers. */
const dcp_item **item_list_by_path(const dcp_checkpoint *ck, size_t *n);

/* Key i of the item's path. Items of flat layouts have one: their name. */
size_t item_path_len(const dcp_item *item);
dcp_key item_path_key(const dcp_item *item, size_t i);
bool item_key_equal(dcp_key a, dcp_key b);

/* The item that a name on the command line means: as it is, or as ls prints it. rank -1: common or the only one.
 * NULL: the reason has been printed. */
const dcp_item *item_list_find(const dcp_checkpoint *ck, const char *name, int rank);

/* Distinct files of an item's chunks, sorted; the names are the checkpoint's, the array is freed with free. False: err is set. */
bool item_files(const dcp_checkpoint *ck, const dcp_item *item, const char ***out, size_t *n, dcp_error *err);

/* dtype of a tensor, "object" otherwise. */
const char *item_type_name(const dcp_item *item);

/* Python's repr of an item's value; errors name the item. *out is freed with dcp_text_free. */
dcp_status item_repr(const dcp_item *item, const dcp_value *value, char **out, size_t *len, dcp_error *err);

#endif
