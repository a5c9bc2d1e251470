/* Messages of the global plan, in a world of three ranks where one of them sends what the input says. The first byte tells which
 * message that is and from whom, and whether the ranks list the same names. */
#include "tests/support/plan_world.h"

enum { RANKS = 3, MESSAGES = 7 };

static uint8_t memory[64];
static const int64_t shape[] = {6, 4}, sizes[] = {2, 4}, starts[RANKS][2] = {{0, 0}, {2, 0}, {4, 0}}, zeros[2];

static void add(dcp_save_plan *p, const char *name, dcp_item_kind kind, int rank, bool is_whole)
{
    static dcp_key keys[2];
    keys[0] = dcp_key_str("model");
    keys[1] = dcp_key_str(name + 6);
    dcp_write_item item = {.fqn = dcp_str_of(name), .path = keys, .path_len = 2, .kind = kind, .dtype = DCP_FLOAT32, .ndim = 2};
    item.global_extents = shape;
    item.box = is_whole ? (dcp_box){zeros, shape} : (dcp_box){starts[rank], sizes};
    item.tensor.data = memory;
    item.object = (const dcp_value *)memory; /* never looked into */
    dcp_save_plan_add(p, &item, NULL);
}

static dcp_save_plan *make_plan(int rank, bool has_other_names)
{
    static const dcp_key path[] = {{false, 0, {"model", 5}}, {true, 0, {NULL, 0}}};
    static const dcp__container container = {path, 2, {"dict", 4}, 1};
    dcp_save_plan *p = NULL;
    if (dcp__save_plan_create(dcp__context(NULL), &p, NULL) == DCP_OK) {
        add(p, has_other_names ? "model.own" : "model.w", DCP_ITEM_TENSOR, rank, true);
        add(p, "model.sharded", DCP_ITEM_TENSOR, rank, false);
        add(p, "model.object", DCP_ITEM_OBJECT, rank, true);
        dcp__save_plan_add_containers(p, &container, 1, NULL);
    }
    return p;
}

/* ---- what the input takes the place of ---- */

static void replace(dcp__buf *b, const uint8_t *data, size_t size)
{
    b->len = 0;
    dcp__buf_put(b, data, size);
}

static void replace_mail(dcp__mail *m, int to, const uint8_t *data, size_t size)
{
    size_t at = m->start[to], end = m->start[to + 1], rest = m->bytes.len - end;
    if (size > end - at && !dcp__buf_reserve(&m->bytes, size - (end - at))) {
        return;
    }
    if (m->bytes.data) {
        memmove(m->bytes.data + at + size, m->bytes.data + end, rest);
        memcpy(m->bytes.data + at, data, size);
    }
    m->bytes.len = at + size + rest;
    for (int r = to + 1; r <= RANKS; r++) {
        m->start[r] = m->start[r] - end + at + size;
    }
}

static void try_hellos(const uint8_t *data, size_t size)
{
    dcp__hellos h;
    if (dcp__hellos_decode(NULL, data, size, RANKS, &h, NULL) == DCP_OK) {
        dcp__hellos_reset(&h);
    }
}

static void try_cache(plan_world *w, int rank, const uint8_t *data, size_t size)
{
    dcp__plan_cache c;
    if (dcp__plan_cache_decode(NULL, data, size, &c, NULL) == DCP_OK) {
        dcp__plan_cache_reset(&c);
    }
    if (pw_save(w, NULL) == DCP_OK) {
        replace(&w->caches[rank].bytes, data, size);
        w->use_cache = true;
        pw_save(w, NULL);
    }
}

static void run(plan_world *w, int message, int rank, const uint8_t *data, size_t size)
{
    dcp_error err = DCP_ERROR_INIT;
    pw_restart(w);
    dcp_status status = pw_hello(w, &err);
    status = status == DCP_OK ? pw_encode(w, &err) : status;
    if (status == DCP_OK && message == 0) {
        replace_mail(&w->plan_mail[rank], 0, data, size);
    }
    for (int o = 0; o < RANKS && status == DCP_OK; o++) {
        status = pw_own(w, o, &err);
    }
    if (status == DCP_OK && message == 1) {
        replace(&w->offers[rank], data, size);
    }
    status = status == DCP_OK ? pw_assign(w, &err) : status;
    if (status == DCP_OK && message == 2) {
        dcp__local_accept(w->locals[rank], 0, data, size, &err);
    }
    status = status == DCP_OK ? pw_write(w, &err) : status;
    if (status == DCP_OK && message == 3) {
        replace_mail(&w->results[rank], 0, data, size);
    }
    status = status == DCP_OK ? pw_fragments(w, &err) : status;
    status = status == DCP_OK ? pw_facts(w, &err) : status;
    if (status == DCP_OK && message >= 4) {
        replace(message == 4 ? &w->fragments[rank] : &w->facts[rank], data, size);
    }
    if (status == DCP_OK) {
        pw_merge(w, &err);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    dcp_save_plan *plans[RANKS];
    plan_world w;
    if (size == 0) {
        return 0;
    }
    int message = data[0] % 8, rank = data[0] / 8 % RANKS;
    bool has_other_names = data[0] >= 128;
    if (message == MESSAGES) {
        try_hellos(data + 1, size - 1);
        return 0;
    }
    for (int r = 0; r < RANKS; r++) {
        plans[r] = make_plan(r, has_other_names && r == 1);
    }
    pw_init(&w, NULL, RANKS, (const dcp_save_plan *const *)plans);
    if (message == 6) {
        try_cache(&w, rank, data + 1, size - 1);
    } else {
        run(&w, message, rank, data + 1, size - 1);
    }
    pw_free(&w);
    for (int r = 0; r < RANKS; r++) {
        dcp_save_plan_free(plans[r]);
    }
    return 0;
}
