#include "stray_files.h"

#include "cli.h"

#include <stdlib.h>
#include <string.h>

/* Deeper than any layout goes. Links are followed, so there must be a bound. */
#define MAX_LEVELS 4

typedef struct search {
    dcp_storage *storage;
    const char **known; /* sorted names */
    size_t n_known;
    stray_files *out;
    const char *below; /* directory that is being listed */
    int level;
    dcp_error *err;
} search;

static int compare_texts(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

static int compare_files(const void *a, const void *b)
{
    return strcmp(((const stray_file *)a)->name, ((const stray_file *)b)->name);
}

static bool ends_with(const char *text, const char *end)
{
    size_t n = strlen(text), n_end = strlen(end);
    return n >= n_end && strcmp(text + n - n_end, end) == 0;
}

/* ".metadata", "__3.metadata", "model.safetensors.index.json" */
static bool is_metadata(const char *name)
{
    return ends_with(name, ".metadata") || ends_with(name, ".index.json");
}

static bool is_known(const search *s, const char *name)
{
    return is_metadata(name) || bsearch(&name, s->known, s->n_known, sizeof *s->known, compare_texts);
}

/* Takes over name. */
static dcp_status add_stray(search *s, char *name)
{
    dcp_stat st;
    dcp_status rc = s->storage->ops->stat(s->storage, name, &st, s->err);
    if (rc != DCP_OK) {
        free(name);
        return rc == DCP_NOT_FOUND ? DCP_OK : rc; /* gone meanwhile, or a link to nowhere */
    }
    stray_files *out = s->out;
    out->files = must_resize(out->files, out->n + 1, sizeof *out->files);
    out->files[out->n++] = (stray_file){name, st.bytes};
    return DCP_OK;
}

static dcp_status search_dir(search *s, const char *dir, int level);

static dcp_status on_entry(void *user, const char *name, dcp_entry_type type)
{
    search *s = user;
    char *path = must_alloc(strlen(s->below) + strlen(name) + 2, 1);
    sprintf(path, "%s%s%s", s->below, *s->below ? "/" : "", name);
    if (type == DCP_ENTRY_FILE && !is_known(s, path)) {
        return add_stray(s, path);
    }
    dcp_status rc = DCP_OK;
    if (type == DCP_ENTRY_DIR && s->level < MAX_LEVELS) {
        rc = search_dir(s, path, s->level + 1);
    }
    free(path);
    return rc;
}

static dcp_status search_dir(search *s, const char *dir, int level)
{
    search inner = *s;
    inner.below = dir;
    inner.level = level;
    return s->storage->ops->list(s->storage, dir, on_entry, &inner, s->err);
}

static const char **sort_names(const dcp_file_info *known, size_t n)
{
    const char **names = must_alloc(n, sizeof *names);
    for (size_t i = 0; i < n; i++) {
        names[i] = known[i].name;
    }
    qsort(names, n, sizeof *names, compare_texts);
    return names;
}

bool stray_files_find(dcp_context *ctx, const char *dir, dcp_layout layout, const dcp_file_info *known, size_t n_known,
                      stray_files *out, dcp_error *err)
{
    if (layout != DCP_LAYOUT_DCP && layout != DCP_LAYOUT_RANK_LOCAL && layout != DCP_LAYOUT_HF) {
        return true;
    }
    search s = {.n_known = n_known, .out = out, .err = err};
    if (dcp_storage_posix(ctx, dir, &s.storage, err) != DCP_OK) {
        return false;
    }
    s.known = sort_names(known, n_known);
    dcp_status rc = search_dir(&s, "", 0);
    if (out->n) { /* without any there is no array, and qsort wants one */
        qsort(out->files, out->n, sizeof *out->files, compare_files);
    }
    free(s.known);
    dcp_storage_free(s.storage);
    return rc == DCP_OK;
}

void stray_files_free(stray_files *s)
{
    for (size_t i = 0; i < s->n; i++) {
        free(s->files[i].name);
    }
    free(s->files);
}
