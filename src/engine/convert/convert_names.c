#include "engine/convert/convert_names.h"

#include <regex.h>
#include <stdio.h>
#include <string.h>

#include "base/buf.h"

#define MAX_GROUPS 10

typedef enum edit_kind { EDIT_REGEX, EDIT_ADD, EDIT_STRIP } edit_kind;

struct dcp__edit {
    edit_kind kind;
    regex_t regex;
    bool is_global;
    char *text; /* replacement, or prefix */
};

/* ---- compiling ---- */

/* The part up to the delimiter, NUL-terminated; a backslash in front of the delimiter is taken off. Returns what is behind it,
 * NULL if it is not there. */
static const char *take_part(dcp_context *ctx, const char *at, char delimiter, char **out)
{
    char *part = dcp__alloc(ctx, strlen(at) + 1);
    size_t n = 0;
    *out = part;
    while (part && *at && *at != delimiter) {
        if (at[0] == '\\' && at[1] == delimiter) {
            at++;
        } else if (at[0] == '\\' && at[1]) {
            part[n++] = *at++;
        }
        part[n++] = *at++;
    }
    if (part) {
        part[n] = 0;
    }
    return part && *at ? at + 1 : NULL;
}

static dcp_status bad_edit(const char *text, const char *why, dcp_error *err)
{
    return dcp__fail(err, DCP_ARG, "rename \"%s\": %s", dcp__print(dcp_str_of(text)).text, why);
}

/* Groups that the replacement refers to must be there. */
static bool has_groups(const char *text, size_t groups)
{
    for (; *text; text++) {
        if (*text == '\\' && text[1]) {
            text++;
            if (*text >= '1' && *text <= '9' && (size_t)(*text - '0') > groups) {
                return false;
            }
        }
    }
    return true;
}

static dcp_status compile_regex(struct dcp__edit *e, const char *text, const char *pattern, const char *flags, dcp_error *err)
{
    char why[128];
    int cflags = REG_EXTENDED;
    for (; *flags; flags++) {
        if (*flags != 'g' && *flags != 'i') {
            return bad_edit(text, "the flags are g and i", err);
        }
        e->is_global |= *flags == 'g';
        cflags |= *flags == 'i' ? REG_ICASE : 0;
    }
    int rc = regcomp(&e->regex, pattern, cflags);
    if (rc != 0) {
        regerror(rc, &e->regex, why, sizeof why);
        return bad_edit(text, why, err);
    }
    if (!has_groups(e->text, e->regex.re_nsub)) {
        regfree(&e->regex);
        return bad_edit(text, "it refers to a group that the pattern does not have", err);
    }
    e->kind = EDIT_REGEX;
    return DCP_OK;
}

static dcp_status compile_substitution(dcp_context *ctx, struct dcp__edit *e, const char *text, dcp_error *err)
{
    char delimiter = text[1], *pattern = NULL, *replacement = NULL;
    if (!delimiter || delimiter == '\\') {
        return bad_edit(text, "there is no delimiter, as in s/regex/text/", err);
    }
    const char *rest = take_part(ctx, text + 2, delimiter, &pattern);
    rest = rest ? take_part(ctx, rest, delimiter, &replacement) : NULL;
    e->text = replacement;
    dcp_status status = !pattern || (rest && !replacement) ? dcp__nomem(err)
                        : !rest                            ? bad_edit(text, "it is not of the form s/regex/text/", err)
                                                           : compile_regex(e, text, pattern, rest, err);
    dcp__free(ctx, pattern);
    return status;
}

static dcp_status compile_edit(dcp_context *ctx, struct dcp__edit *e, const char *text, dcp_error *err)
{
    const char *colon = strchr(text, ':');
    *e = (struct dcp__edit){.kind = EDIT_ADD};
    if (strncmp(text, "add:", 4) == 0 || strncmp(text, "strip:", 6) == 0) {
        e->kind = text[0] == 'a' ? EDIT_ADD : EDIT_STRIP;
        e->text = dcp__strndup(ctx, colon + 1, strlen(colon + 1));
        return !e->text ? dcp__nomem(err) : !e->text[0] ? bad_edit(text, "the prefix is empty", err) : DCP_OK;
    }
    if (text[0] == 's') {
        return compile_substitution(ctx, e, text, err);
    }
    return bad_edit(text, "it is none of s/regex/text/, add:prefix and strip:prefix", err);
}

dcp_status dcp__edits_compile(dcp_context *ctx, const char *const *texts, size_t n, dcp__edits *out, dcp_error *err)
{
    dcp__edits e = {.ctx = ctx, .list = dcp__calloc(ctx, n, sizeof *e.list)};
    dcp_status status = e.list ? DCP_OK : dcp__nomem(err);
    while (status == DCP_OK && e.n < n) {
        status = compile_edit(ctx, &e.list[e.n], texts[e.n], err);
        if (status != DCP_OK) {
            dcp__free(ctx, e.list[e.n].text);
        } else {
            e.n++;
        }
    }
    if (status != DCP_OK) {
        dcp__edits_reset(&e);
        return status;
    }
    *out = e;
    return DCP_OK;
}

void dcp__edits_reset(dcp__edits *e)
{
    for (size_t i = 0; i < e->n; i++) {
        if (e->list[i].kind == EDIT_REGEX) {
            regfree(&e->list[i].regex);
        }
        dcp__free(e->ctx, e->list[i].text);
    }
    if (e->ctx) {
        dcp__free(e->ctx, e->list);
    }
    *e = (dcp__edits){0};
}

/* ---- names ---- */

static void put_group(dcp__buf *out, const char *subject, const regmatch_t *group)
{
    if (group->rm_so >= 0) {
        dcp__buf_put(out, subject + group->rm_so, (size_t)(group->rm_eo - group->rm_so));
    }
}

static void put_replacement(dcp__buf *out, const char *text, const char *subject, const regmatch_t *groups)
{
    for (; *text; text++) {
        if (*text == '&') {
            put_group(out, subject, &groups[0]);
        } else if (*text == '\\' && text[1]) {
            text++;
            if (*text >= '1' && *text <= '9') {
                put_group(out, subject, &groups[*text - '0']);
            } else {
                dcp__buf_put_byte(out, (uint8_t)*text);
            }
        } else {
            dcp__buf_put_byte(out, (uint8_t)*text);
        }
    }
}

/* With the flag g as sed: an empty match counts unless it follows the one before at once. */
static void substitute(const struct dcp__edit *e, const char *name, dcp__buf *out)
{
    regmatch_t groups[MAX_GROUPS];
    bool follows = false, goes_on = true;
    for (int flags = 0; goes_on && regexec(&e->regex, name, MAX_GROUPS, groups, flags) == 0; flags = REG_NOTBOL) {
        bool is_empty = groups[0].rm_eo == groups[0].rm_so;
        dcp__buf_put(out, name, (size_t)groups[0].rm_so);
        if (!(is_empty && follows && groups[0].rm_so == 0)) {
            put_replacement(out, e->text, name, groups);
        }
        name += groups[0].rm_eo;
        follows = !is_empty;
        goes_on = e->is_global && (!is_empty || *name);
        if (goes_on && is_empty) {
            dcp__buf_put_byte(out, (uint8_t)*name++); /* it must not be found again */
        }
    }
    dcp__buf_put(out, name, strlen(name));
}

static bool starts_with(dcp_str name, const char *prefix)
{
    size_t len = strlen(prefix);
    return name.len >= len && memcmp(name.ptr, prefix, len) == 0;
}

static void edit(const struct dcp__edit *e, dcp_str name, dcp__buf *out)
{
    if (e->kind == EDIT_REGEX) {
        substitute(e, name.ptr, out);
        return;
    }
    size_t skip = e->kind == EDIT_STRIP && starts_with(name, e->text) ? strlen(e->text) : 0;
    if (e->kind == EDIT_ADD) {
        dcp__buf_put(out, e->text, strlen(e->text));
    }
    dcp__buf_put(out, name.ptr + skip, name.len - skip);
}

dcp_status dcp__edits_apply(const dcp__edits *e, dcp_str name, dcp__arena *arena, dcp_str *out, dcp_error *err)
{
    dcp__buf buf;
    dcp__buf_init(&buf, arena->ctx);
    for (size_t i = 0; i < e->n; i++) {
        if (e->list[i].kind == EDIT_REGEX && memchr(name.ptr, 0, name.len)) {
            dcp__buf_reset(&buf);
            return dcp__fail(err, DCP_UNSUPPORTED, "name '%s' holds NUL and cannot be matched", dcp__print(name).text);
        }
        buf.len = 0;
        edit(&e->list[i], name, &buf);
        name = dcp__arena_str(arena, (dcp_str){(const char *)buf.data, buf.len});
        if (buf.failed || !name.ptr) {
            dcp__buf_reset(&buf);
            return dcp__nomem(err);
        }
    }
    dcp__buf_reset(&buf);
    *out = name;
    return DCP_OK;
}

/* ---- paths ---- */

/* The text of a key in a name; digits has room for an integer. */
static dcp_str key_text(dcp_key key, char digits[24])
{
    if (!key.is_int) {
        return key.string;
    }
    return (dcp_str){digits, (size_t)snprintf(digits, 24, "%lld", (long long)key.integer)};
}

/* Takes "key." off the front, or ".key" off the end, of a text that has more than that. */
static bool take_key(dcp_str *text, dcp_key key, bool from_end)
{
    char digits[24];
    dcp_str k = key_text(key, digits);
    if (text->len <= k.len) {
        return false;
    }
    const char *dot = from_end ? text->ptr + text->len - k.len - 1 : text->ptr + k.len;
    const char *at = from_end ? dot + 1 : text->ptr;
    if (*dot != '.' || memcmp(at, k.ptr, k.len) != 0) {
        return false;
    }
    text->ptr += from_end ? 0 : k.len + 1;
    text->len -= k.len + 1;
    return true;
}

static bool is_key(dcp_str text, dcp_key key)
{
    char digits[24];
    dcp_str k = key_text(key, digits);
    return text.len == k.len && (k.len == 0 || memcmp(text.ptr, k.ptr, k.len) == 0);
}

static size_t count_parts(dcp_str text)
{
    size_t n = 1;
    for (size_t i = 0; i < text.len; i++) {
        n += text.ptr[i] == '.';
    }
    return n;
}

/* Appends the parts between dots. */
static bool put_parts(dcp__arena *arena, dcp_str text, dcp_key *out, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        const char *dot = i + 1 < n ? memchr(text.ptr, '.', text.len) : NULL;
        size_t len = dot ? (size_t)(dot - text.ptr) : text.len;
        out[i] = (dcp_key){.string = dcp__arena_str(arena, (dcp_str){text.ptr, len})};
        if (!out[i].string.ptr) {
            return false;
        }
        text.ptr += len + 1;
        text.len -= dot ? len + 1 : len;
    }
    return true;
}

dcp_status dcp__renamed_path(dcp__arena *arena, const dcp_key *before, size_t before_len, dcp_str name, const dcp_key **out,
                             size_t *out_len, dcp_error *err)
{
    size_t head = 0, tail = 0;
    bool is_used_up = false; /* the name ends with the keys of the tail */
    dcp_str rest = name;
    while (head + 1 < before_len && take_key(&rest, before[head], false)) {
        head++;
    }
    while (head + tail < before_len && !is_used_up) {
        dcp_key key = before[before_len - 1 - tail];
        is_used_up = is_key(rest, key);
        if (!is_used_up && !take_key(&rest, key, true)) {
            break;
        }
        tail++;
    }
    size_t middle = before_len - head - tail, parts = is_used_up ? 0 : middle == 1 ? 1 : count_parts(rest);
    dcp_key *path = dcp__arena_alloc(arena, (head + parts + tail) * sizeof *path);
    if (!path || !put_parts(arena, rest, path + head, parts)) {
        return dcp__arena_fail(arena, err);
    }
    if (head) {
        memcpy(path, before, head * sizeof *path);
    }
    if (tail) {
        memcpy(path + head + parts, before + before_len - tail, tail * sizeof *path);
    }
    *out = path;
    *out_len = head + parts + tail;
    return DCP_OK;
}

dcp_status dcp__path_name(dcp__arena *arena, const dcp_key *path, size_t n, dcp_str *out, dcp_error *err)
{
    char digits[24];
    dcp__buf buf;
    dcp__buf_init(&buf, arena->ctx);
    for (size_t i = 0; i < n; i++) {
        dcp_str key = key_text(path[i], digits);
        dcp__buf_put(&buf, ".", i > 0);
        dcp__buf_put(&buf, key.ptr, key.len);
    }
    *out = dcp__arena_str(arena, (dcp_str){(const char *)buf.data, buf.len});
    bool failed = buf.failed || !out->ptr;
    dcp__buf_reset(&buf);
    return failed ? dcp__nomem(err) : DCP_OK;
}
