/* Changes of names: what sed's s command does, and prefixes; and where a changed name belongs in the tree. */
#ifndef DCP_ENGINE_CONVERT_NAMES_H
#define DCP_ENGINE_CONVERT_NAMES_H

#include "base/arena.h"
#include "dcp/state.h"

typedef struct dcp__edits {
    dcp_context *ctx;
    struct dcp__edit *list;
    size_t n;
} dcp__edits;

/* Texts are "s/regex/text/" (POSIX extended; any delimiter; & and \1 to \9 in the text; g and i behind it), "add:model." or
 * "strip:model.". Errors: ARG (with the text and what is wrong), NOMEM. */
dcp_status dcp__edits_compile(dcp_context *ctx, const char *const *texts, size_t n, dcp__edits *out, dcp_error *err);
void dcp__edits_reset(dcp__edits *e);

/* The name after all edits, one after the other; in the arena, NUL-terminated. A prefix that a name does not have is not
 * stripped. Errors: NOMEM, UNSUPPORTED (a name with a NUL byte, where there is a regex). */
dcp_status dcp__edits_apply(const dcp__edits *e, dcp_str name, dcp__arena *arena, dcp_str *out, dcp_error *err);

/* The path of a name that was `before` and is `name` now: keys at the start and at the end whose text is still there stay as they
 * are. What is between is one key if it was one, else it is cut at its dots. */
dcp_status dcp__renamed_path(dcp__arena *arena, const dcp_key *before, size_t before_len, dcp_str name, const dcp_key **out,
                             size_t *out_len, dcp_error *err);

/* The name that flattening gives to a path. */
dcp_status dcp__path_name(dcp__arena *arena, const dcp_key *path, size_t n, dcp_str *out, dcp_error *err);

#endif
