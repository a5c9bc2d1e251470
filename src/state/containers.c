/* Putting back what flattening loses. */
#include "state/containers.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "state/node.h"

static dcp_value *step(dcp_value *at, dcp_key key)
{
    if (dcp__is_dict(at)) {
        return dcp_dict_get(at, key);
    }
    return key.is_int && key.integer >= 0 && dcp__is_kind(at, DCP_KIND_LIST) ? dcp_value_at(at, (size_t)key.integer) : NULL;
}

static dcp_value *walk(dcp_value *root, const dcp_key *path, size_t n)
{
    for (size_t i = 0; root && i < n; i++) {
        root = step(root, path[i]);
    }
    return root;
}

/* The integer that a decimal text spells, if it is how Python would write it. */
static bool parse_key(dcp_str text, int64_t *out)
{
    char copy[24], again[24], *end;
    if (text.len == 0 || text.len >= sizeof copy) {
        return false;
    }
    memcpy(copy, text.ptr, text.len);
    copy[text.len] = 0;
    long long value = strtoll(copy, &end, 10);
    snprintf(again, sizeof again, "%lld", value);
    *out = value;
    return *end == 0 && strcmp(copy, again) == 0;
}

dcp_key dcp__stored_key(const dcp_value *dict, dcp_key key)
{
    int64_t integer;
    if (key.is_int || dcp_dict_get(dict, key) || !parse_key(key.string, &integer) || !dcp_dict_get(dict, dcp_key_int(integer))) {
        return key;
    }
    return dcp_key_int(integer);
}

static bool is(dcp_str text, const char *expected)
{
    return text.len == strlen(expected) && memcmp(text.ptr, expected, text.len) == 0;
}

/* From the last to the first: a key is renamed after everything below it has been found by its text. */
dcp_status dcp__restore_containers(dcp_value *root, const dcp__container *containers, size_t n, dcp_error *err)
{
    for (size_t i = n; i-- > 0;) {
        const dcp__container *c = &containers[i];
        int64_t integer;
        if (is(c->kind, "ordered_dict")) {
            dcp_value *v = walk(root, c->path, c->path_len);
            if (dcp__is_dict(v)) {
                v->kind = DCP_KIND_ORDERED_DICT;
            }
        } else if (is(c->kind, "int_key") && c->path_len) {
            dcp_key key = c->path[c->path_len - 1];
            dcp_value *parent = walk(root, c->path, c->path_len - 1);
            if (dcp__is_dict(parent) && !key.is_int && parse_key(key.string, &integer)) {
                dcp_status status = dcp__dict_rename(parent, key, dcp_key_int(integer), err);
                if (status != DCP_OK) {
                    return status;
                }
            }
        }
    }
    return DCP_OK;
}
