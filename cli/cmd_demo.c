/* cmd_demo.c - dcptool demo: ranks, which are threads here, save a made-up training state; others reload and check it. */
#include "cli.h"
#include "demo_state.h"
#include "escape.h"
#include "json_writer.h"
#include "table.h"

#include <dirent.h>
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char doc[] =
    "Save a made-up training state on some ranks, which are threads here, reload it on another number of them with the tensors "
    "split another way, and check every value.\n"
    "\v"
    "The checkpoint stays in DIR; without one it is made in a temporary directory and removed.\n"
    "\n"
    "Example:\n"
    "  dcptool demo --ranks 4 --reload-ranks 3 --size 1GiB /tmp/demo\n"
    "  dcptool ls /tmp/demo";

enum { KEY_FORCE = 'f', KEY_RANKS = 0x400, KEY_RELOAD_RANKS, KEY_SIZE, MAX_RANKS = 64, MAX_WIDE_RANKS = 8 };

static const struct argp_option option_list[] = {
    {"ranks", KEY_RANKS, "N", 0, "That save (default 4)", 0},
    {"reload-ranks", KEY_RELOAD_RANKS, "N", 0, "That reload (default 3)", 0},
    {"size", KEY_SIZE, "SIZE", 0, "Of the state, such as 1GiB (default 64MiB)", 0},
    {"force", KEY_FORCE, NULL, 0, "Replace the checkpoint that is in DIR", 0},
    {0},
};

typedef struct demo {
    options opts; /* opts.path: DIR, or NULL */
    int ranks, reload_ranks;
    uint64_t size;
    bool force;
    demo_model model;
    const char *dir;
} demo;

static error_t parse(int key, char *arg, struct argp_state *state)
{
    demo *d = state->input;
    switch (key) {
    case ARGP_KEY_INIT: state->child_inputs[0] = &d->opts; return 0;
    case ARGP_KEY_ARG:
        if (state->arg_num > 0) {
            argp_error(state, "too many arguments");
        }
        d->opts.path = arg;
        return 0;
    case KEY_RANKS: d->ranks = (int)options_number(state, "--ranks", arg, 1, MAX_RANKS); return 0;
    case KEY_RELOAD_RANKS: d->reload_ranks = (int)options_number(state, "--reload-ranks", arg, 1, MAX_RANKS); return 0;
    case KEY_SIZE: d->size = options_size(state, arg); return 0;
    case KEY_FORCE: d->force = true; return 0;
    default: return ARGP_ERR_UNKNOWN;
    }
}

/* ---- ranks ---- */

/* What a rank does, and what came of it. */
typedef struct rank {
    const demo *demo;
    void (*run)(struct rank *self);
    pthread_t thread;
    dcp_comm *comm;
    int number;
    dcp_error err;
    dcp_save_report saved;
    dcp_load_report loaded;
    uint64_t checked, wrong;
    char wrong_name[64];
} rank;

static void *rank_main(void *arg)
{
    rank *r = arg;
    r->run(r);
    dcp_comm_free(r->comm);
    return NULL;
}

/* Runs a group and waits for it. Its ranks fail together, so the first one tells why. */
static rank *run_ranks(const demo *d, int n, void (*run)(rank *))
{
    dcp_error err = DCP_ERROR_INIT;
    dcp_comm *comms[MAX_RANKS];
    if (dcp_comm_threads(d->opts.ctx, n, comms, &err) != DCP_OK) {
        complain_error(&err);
        return NULL;
    }
    rank *ranks = must_alloc((size_t)n, sizeof *ranks);
    for (int i = 0; i < n; i++) {
        ranks[i] = (rank){.demo = d,
                          .run = run,
                          .comm = comms[i],
                          .number = i,
                          .err = DCP_ERROR_INIT,
                          .saved = DCP_SAVE_REPORT_INIT,
                          .loaded = DCP_LOAD_REPORT_INIT};
    }
    for (int i = 0; i < n; i++) {
        if (pthread_create(&ranks[i].thread, NULL, rank_main, &ranks[i]) != 0) {
            complain("cannot start a thread for rank %d", i);
            exit(EXIT_PROBLEM); /* the ranks that wait for it go as well */
        }
    }
    for (int i = 0; i < n; i++) {
        pthread_join(ranks[i].thread, NULL);
    }
    if (ranks[0].err.code != DCP_OK) {
        complain_error(&ranks[0].err);
        free(ranks);
        return NULL;
    }
    return ranks;
}

static const char *const per_rank[] = {DEMO_PER_RANK};

static void save(rank *self)
{
    const demo *d = self->demo;
    dcp_save_opts opts = DCP_SAVE_OPTS_INIT;
    demo_state *s = demo_state_create(d->model, self->number, d->ranks, 0, true, true, &self->err);
    opts.comm = self->comm;
    opts.overwrite = d->force;
    opts.per_rank = per_rank;
    opts.n_per_rank = 1;
    /* A rank without a state takes part all the same: the others learn of it. */
    dcp_save(d->opts.ctx, d->dir, s ? demo_state_value(s) : NULL, &opts, &self->saved, &self->err);
    demo_state_free(s);
}

static void load(rank *self)
{
    const demo *d = self->demo;
    dcp_load_opts opts = DCP_LOAD_OPTS_INIT;
    bool has_own = self->number < d->ranks; /* the others would begin with a random state of their own */
    const char *name = NULL;
    demo_state *s = demo_state_create(d->model, self->number, d->reload_ranks, 1, false, has_own, &self->err);
    opts.comm = self->comm;
    opts.per_rank = per_rank;
    opts.n_per_rank = 1;
    dcp_status status = dcp_load(d->opts.ctx, d->dir, s ? demo_state_value(s) : NULL, &opts, &self->loaded, &self->err);
    if (s && status == DCP_OK) {
        self->wrong = demo_state_check(s, &self->checked, &name);
        snprintf(self->wrong_name, sizeof self->wrong_name, "%s", name ? name : "");
    }
    demo_state_free(s);
}

/* ---- figures ---- */

typedef struct figures {
    dcp_save_report save; /* seconds: those of the slowest in each phase */
    dcp_rank_report ranks[MAX_RANKS];
    double load_plan_seconds, load_read_seconds;
    uint64_t saved_bytes, loaded_bytes, checked, wrong;
    int slowest_reader;
    const char *wrong_name;
} figures;

static double longer(double a, double b)
{
    return a > b ? a : b;
}

static void take_saved(figures *f, const rank *ranks, int n)
{
    f->save = ranks[0].saved;
    for (int i = 0; i < n; i++) {
        const dcp_save_report *r = &ranks[i].saved;
        f->ranks[i] = (dcp_rank_report){r->plan_seconds, r->write_seconds, r->sync_seconds, r->bytes};
        f->save.plan_seconds = longer(f->save.plan_seconds, r->plan_seconds);
        f->save.write_seconds = longer(f->save.write_seconds, r->write_seconds);
        f->save.sync_seconds = longer(f->save.sync_seconds, r->sync_seconds);
        f->saved_bytes += r->bytes;
    }
}

static double load_seconds(const rank *r)
{
    return r->loaded.plan_seconds + r->loaded.read_seconds;
}

static void take_loaded(figures *f, const rank *ranks, int n)
{
    for (int i = 0; i < n; i++) {
        f->load_plan_seconds = longer(f->load_plan_seconds, ranks[i].loaded.plan_seconds);
        f->load_read_seconds = longer(f->load_read_seconds, ranks[i].loaded.read_seconds);
        f->slowest_reader = load_seconds(&ranks[i]) > load_seconds(&ranks[f->slowest_reader]) ? i : f->slowest_reader;
        f->loaded_bytes += ranks[i].loaded.bytes;
        f->checked += ranks[i].checked;
        f->wrong += ranks[i].wrong;
        f->wrong_name = ranks[i].wrong ? ranks[i].wrong_name : f->wrong_name;
    }
}

/* ---- who wrote what ---- */

/* The rank that wrote a file; its name begins with it. */
static int writer_of(const char *file)
{
    if (!file || strncmp(file, "__", 2) != 0) {
        return -1;
    }
    char *end;
    long number = strtol(file + 2, &end, 10);
    return end > file + 2 && *end == '_' && number >= 0 && number < MAX_RANKS ? (int)number : -1;
}

/* bytes[rank] of an item as it is stored. */
static void bytes_by_rank(const dcp_checkpoint *ck, const dcp_item *item, uint64_t *bytes)
{
    memset(bytes, 0, MAX_RANKS * sizeof *bytes);
    for (size_t i = 0; i < item->n_chunks; i++) {
        dcp_chunk_info chunk;
        int writer = dcp_item_chunk(ck, item, i, &chunk, NULL) == DCP_OK ? writer_of(chunk.file) : -1;
        if (writer >= 0) {
            bytes[writer] += chunk.length;
        }
    }
}

static void print_row(table *t, const dcp_checkpoint *ck, const dcp_item *item, int ranks)
{
    uint64_t bytes[MAX_RANKS];
    char line[MAX_RANKS + 1] = "", size[ESCAPE_SIZE_BYTES];
    table_row *row = table_row_add(t, NULL);
    bytes_by_rank(ck, item, bytes);
    table_cell(row, 0, item->fqn.ptr);
    for (int i = 0; i < ranks; i++) {
        line[i] = bytes[i] ? '#' : '.';
        if (ranks <= MAX_WIDE_RANKS) {
            table_cell(row, i + 1, bytes[i] ? escape_size(bytes[i], size) : "-");
        }
    }
    if (ranks > MAX_WIDE_RANKS) {
        table_cell(row, 1, line);
    }
}

/* Ranks are columns, items rows; with many ranks a column is one character. */
static void print_picture(const dcp_checkpoint *ck, int ranks)
{
    char title[24];
    table *t = table_create();
    table_column(t, "WRITTEN", TABLE_LEFT);
    for (int i = 0; i < ranks && ranks <= MAX_WIDE_RANKS; i++) {
        snprintf(title, sizeof title, "RANK %d", i);
        table_column(t, title, TABLE_RIGHT);
    }
    if (ranks > MAX_WIDE_RANKS) {
        snprintf(title, sizeof title, "RANKS 0 TO %d", ranks - 1);
        table_column(t, title, TABLE_LEFT);
    }
    for (size_t i = 0; i < dcp_checkpoint_count(ck); i++) {
        print_row(t, ck, dcp_checkpoint_item(ck, i), ranks);
    }
    table_print(t);
}

/* ---- output ---- */

static const char *rate(uint64_t bytes, double seconds, char buf[ESCAPE_SIZE_BYTES])
{
    return escape_size(seconds > 0 ? (uint64_t)((double)bytes / seconds) : 0, buf);
}

static void print_figures(const demo *d, const figures *f)
{
    char size[ESCAPE_SIZE_BYTES], per_second[ESCAPE_SIZE_BYTES];
    const dcp_save_report *s = &f->save;
    printf("\nsaved by %d ranks, split by rows: %s\n", d->ranks, escape_size(f->saved_bytes, size));
    printf("  plan %.3f s, write %.3f s (%s/s), sync %.3f s, commit %.3f s; slowest: rank %d\n", s->plan_seconds,
           s->write_seconds, rate(f->saved_bytes, s->write_seconds, per_second), s->sync_seconds, s->commit_seconds,
           s->slowest_rank);
    printf("reloaded by %d ranks, split by columns: %s\n", d->reload_ranks, escape_size(f->loaded_bytes, size));
    printf("  plan %.3f s, read %.3f s (%s/s); slowest: rank %d\n", f->load_plan_seconds, f->load_read_seconds,
           rate(f->loaded_bytes, f->load_read_seconds, per_second), f->slowest_reader);
    if (f->wrong == 0) {
        printf("checked: %llu values, all as they were saved\n", (unsigned long long)f->checked);
    }
}

static void real_json(json_writer *w, const char *key, double value)
{
    jw_key(w, dcp_str_of(key));
    jw_real(w, value, true);
}

static void written_json(json_writer *w, const dcp_checkpoint *ck, int ranks)
{
    uint64_t bytes[MAX_RANKS];
    jw_key_begin(w, "written", '{');
    for (size_t i = 0; i < dcp_checkpoint_count(ck); i++) {
        const dcp_item *item = dcp_checkpoint_item(ck, i);
        bytes_by_rank(ck, item, bytes);
        jw_key(w, item->fqn);
        jw_begin_inline(w, '[');
        for (int r = 0; r < ranks; r++) {
            jw_uint(w, bytes[r]);
        }
        jw_end(w, ']');
    }
    jw_end(w, '}');
}

static void print_json(const demo *d, const figures *f, const dcp_checkpoint *ck)
{
    json_writer w = JSON_WRITER(stdout);
    jw_begin(&w, '{');
    jw_key_uint(&w, "ranks", (uint64_t)d->ranks);
    jw_key_uint(&w, "reload_ranks", (uint64_t)d->reload_ranks);
    jw_key_uint(&w, "saved_bytes", f->saved_bytes);
    real_json(&w, "plan_seconds", f->save.plan_seconds);
    real_json(&w, "write_seconds", f->save.write_seconds);
    real_json(&w, "sync_seconds", f->save.sync_seconds);
    real_json(&w, "commit_seconds", f->save.commit_seconds);
    jw_key_uint(&w, "slowest_writer", (uint64_t)f->save.slowest_rank);
    jw_key_uint(&w, "loaded_bytes", f->loaded_bytes);
    real_json(&w, "load_plan_seconds", f->load_plan_seconds);
    real_json(&w, "load_read_seconds", f->load_read_seconds);
    jw_key_uint(&w, "slowest_reader", (uint64_t)f->slowest_reader);
    jw_key_uint(&w, "checked_values", f->checked);
    jw_key_uint(&w, "wrong_values", f->wrong);
    written_json(&w, ck, d->ranks);
    jw_end(&w, '}');
}

static int show(const demo *d, const figures *f)
{
    dcp_error err = DCP_ERROR_INIT;
    dcp_checkpoint *ck;
    if (dcp_checkpoint_open(d->opts.ctx, d->dir, NULL, &ck, &err) != DCP_OK) {
        complain_error(&err);
        return EXIT_PROBLEM;
    }
    if (d->opts.json) {
        print_json(d, f, ck);
    } else {
        print_picture(ck, d->ranks);
        print_figures(d, f);
    }
    dcp_checkpoint_close(ck);
    if (f->wrong) {
        complain("%llu values are wrong, some of %s", (unsigned long long)f->wrong, f->wrong_name);
    }
    return f->wrong ? EXIT_PROBLEM : EXIT_GOOD;
}

/* ---- the command ---- */

static int run_demo(const demo *d)
{
    figures f = {0};
    rank *writers = run_ranks(d, d->ranks, save);
    if (!writers) {
        return EXIT_PROBLEM;
    }
    take_saved(&f, writers, d->ranks);
    free(writers);
    rank *readers = run_ranks(d, d->reload_ranks, load);
    if (!readers) {
        return EXIT_PROBLEM;
    }
    take_loaded(&f, readers, d->reload_ranks);
    int status = show(d, &f);
    free(readers);
    return status;
}

/* The directory holds what the demo has saved, and nothing below it. */
static void remove_dir(const char *path)
{
    DIR *dir = opendir(path);
    for (struct dirent *e; dir && (e = readdir(dir));) {
        unlinkat(dirfd(dir), e->d_name, 0); /* "." and ".." stay */
    }
    if (dir) {
        closedir(dir);
    }
    rmdir(path);
}

static int run_in_temporary(demo *d)
{
    char path[4096];
    const char *base = getenv("TMPDIR");
    int n = snprintf(path, sizeof path, "%s/dcptool-demo-XXXXXX", base && *base ? base : "/tmp");
    if (n < 0 || (size_t)n >= sizeof path || !mkdtemp(path)) {
        complain("cannot make a temporary directory: %s", strerror(errno));
        return EXIT_PROBLEM;
    }
    d->dir = path;
    int status = run_demo(d);
    d->dir = NULL;
    remove_dir(path);
    return status;
}

int cmd_demo(int argc, char **argv)
{
    const struct argp_child children[] = {{&options_argp, 0, NULL, 0}, {0}};
    const struct argp argp = {option_list, parse, "[DIR]", doc, children, NULL, NULL};
    demo d = {.ranks = 4, .reload_ranks = 3, .size = (uint64_t)64 << 20};
    options_parse(&argp, argc, argv, &d);
    if (!options_start(&d.opts)) {
        return EXIT_PROBLEM;
    }
    d.model = demo_model_of_size(d.size);
    d.dir = d.opts.path;
    int status = d.dir ? run_demo(&d) : run_in_temporary(&d);
    options_close(&d.opts, NULL);
    return status;
}
