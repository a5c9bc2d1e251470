#include "demo_state.h"

#include "cli.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { LAYERS = 4, RNG_BYTES = 5056, MAX_PARTS = 8 * LAYERS + 8 };

typedef enum spread { SHARDED, REPLICATED, OWN } spread;

/* What one rank holds of one tensor. */
typedef struct part {
    char name[64];
    dcp_dtype dtype;
    int ndim;
    int64_t extents[2], offsets[2], sizes[2];
    uint32_t seed;
    char *data;
} part;

struct demo_state {
    int rank, ranks, axis;
    bool filled;
    dcp_value *value;
    part parts[MAX_PARTS];
    int n_parts;
};

/* Twelve bytes for each element of a layer's weight: itself and two moments. */
demo_model demo_model_of_size(uint64_t bytes)
{
    int64_t width = (int64_t)sqrt((double)bytes / (12 * LAYERS));
    return (demo_model){width < 50 ? 50 : width};
}

/* ---- elements ---- */

/* 24 bits, so that they are exact in a float. */
static uint32_t value_at(uint32_t seed, int64_t index)
{
    return ((uint32_t)index * 2654435761u + seed * 40503u) >> 8;
}

static int64_t count_elems(const part *p)
{
    int64_t n = 1;
    for (int d = 0; d < p->ndim; d++) {
        n *= p->sizes[d];
    }
    return n;
}

static void put(const part *p, int64_t at, int64_t index)
{
    uint32_t v = value_at(p->seed, index);
    switch (p->dtype) {
    case DCP_FLOAT32: ((float *)p->data)[at] = (float)v; break;
    case DCP_INT64: ((int64_t *)p->data)[at] = v; break;
    default: ((uint8_t *)p->data)[at] = (uint8_t)v; break;
    }
}

static bool is_right(const part *p, int64_t at, int64_t index)
{
    uint32_t v = value_at(p->seed, index);
    switch (p->dtype) {
    case DCP_FLOAT32: return ((const float *)p->data)[at] == (float)v;
    case DCP_INT64: return ((const int64_t *)p->data)[at] == v;
    default: return ((const uint8_t *)p->data)[at] == (uint8_t)v;
    }
}

static int64_t columns_of(const part *p, const int64_t *numbers)
{
    return p->ndim > 1 ? numbers[1] : 1;
}

/* Place in the whole tensor of the first element in row i of a part. */
static int64_t row_start(const part *p, int64_t i)
{
    int64_t row = (p->ndim ? p->offsets[0] : 0) + i;
    return row * columns_of(p, p->extents) + (p->ndim > 1 ? p->offsets[1] : 0);
}

static void fill(const part *p)
{
    int64_t columns = columns_of(p, p->sizes), rows = columns ? count_elems(p) / columns : 0;
    for (int64_t i = 0; i < rows; i++) {
        for (int64_t k = 0; k < columns; k++) {
            put(p, i * columns + k, row_start(p, i) + k);
        }
    }
}

static uint64_t count_wrong(const part *p)
{
    uint64_t wrong = 0;
    int64_t columns = columns_of(p, p->sizes), rows = columns ? count_elems(p) / columns : 0;
    for (int64_t i = 0; i < rows; i++) {
        for (int64_t k = 0; k < columns; k++) {
            wrong += !is_right(p, i * columns + k, row_start(p, i) + k);
        }
    }
    return wrong;
}

/* ---- tensors ---- */

/* As torch.chunk cuts: the last ranks may have less, or nothing. */
static void cut(part *p, int axis, int rank, int ranks)
{
    int64_t n = p->extents[axis], each = (n + ranks - 1) / ranks;
    int64_t start = each * rank < n ? each * rank : n;
    p->offsets[axis] = start;
    p->sizes[axis] = n - start < each ? n - start : each;
}

static dcp_status put_in_state(demo_state *s, part *p, spread how, dcp_error *err)
{
    dcp_tensor t = dcp_tensor_make(p->dtype, p->ndim, p->sizes, p->data);
    dcp_box box = {p->offsets, p->sizes};
    dcp_value *v;
    if (how != SHARDED) {
        return dcp_dict_set_tensor(s->value, p->name, &t, err);
    }
    size_t n = count_elems(p) > 0;
    dcp_status status = dcp_sharded_create(NULL, p->dtype, p->ndim, p->extents, n, &t, &box, &v, err);
    if (status != DCP_OK) {
        return status;
    }
    status = dcp_dict_set(s->value, dcp_key_str(p->name), v, err);
    if (status != DCP_OK) {
        dcp_value_free(v);
    }
    return status;
}

static dcp_status add(demo_state *s, const char *name, spread how, dcp_dtype dtype, int64_t rows, int64_t columns, dcp_error *err)
{
    part *p = &s->parts[s->n_parts];
    *p = (part){.dtype = dtype, .ndim = columns ? 2 : rows ? 1 : 0, .extents = {rows, columns}, .sizes = {rows, columns}};
    snprintf(p->name, sizeof p->name, "%s", name);
    p->seed = (uint32_t)s->n_parts + (how == OWN ? 1000u * (uint32_t)(s->rank + 1) : 0);
    if (how == SHARDED) {
        cut(p, s->axis < p->ndim ? s->axis : 0, s->rank, s->ranks);
    }
    size_t bytes = (size_t)count_elems(p) * dcp_dtype_bytes(dtype);
    p->data = calloc(bytes + 1, 1);
    if (!p->data) {
        return dcp_error_set(err, DCP_NOMEM, "out of memory");
    }
    s->n_parts++;
    if (s->filled) {
        fill(p);
    }
    return put_in_state(s, p, how, err);
}

static dcp_status add_layer(demo_state *s, int layer, int64_t width, dcp_error *err)
{
    static const struct {
        const char *format;
        spread how;
        bool is_matrix;
    } tensors[] = {
        {"model.layers.%d.weight", SHARDED, true},
        {"model.layers.%d.bias", SHARDED, false},
        {"model.layers.%d.norm", REPLICATED, false},
        {"optim.exp_avg.layers.%d.weight", SHARDED, true},
        {"optim.exp_avg_sq.layers.%d.weight", SHARDED, true},
    };
    dcp_status status = DCP_OK;
    for (size_t i = 0; i < sizeof tensors / sizeof *tensors && status == DCP_OK; i++) {
        char name[64];
        snprintf(name, sizeof name, tensors[i].format, layer);
        status = add(s, name, tensors[i].how, DCP_FLOAT32, width, tensors[i].is_matrix ? width : 0, err);
    }
    return status;
}

/* ---- objects ---- */

/* The same on every rank. */
static dcp_status add_objects(demo_state *s, dcp_error *err)
{
    dcp_status status = dcp_dict_set_int(s->value, "step", s->filled ? 1000 : 0, err);
    status = status == DCP_OK ? dcp_dict_set_float(s->value, "lr", s->filled ? 3e-4 : 0, err) : status;
    return status == DCP_OK ? dcp_dict_set_string(s->value, "config", s->filled ? "demo, 4 layers" : "", err) : status;
}

static uint64_t count_wrong_objects(const dcp_value *state)
{
    int64_t step;
    dcp_str config = dcp_value_str(dcp_dict_get_str(state, "config"));
    uint64_t wrong = !dcp_value_int(dcp_dict_get_str(state, "step"), &step) || step != 1000;
    wrong += dcp_value_float(dcp_dict_get_str(state, "lr")) != 3e-4;
    return wrong + (!config.ptr || strcmp(config.ptr, "demo, 4 layers") != 0);
}

/* ---- the state ---- */

static dcp_status build(demo_state *s, demo_model model, bool has_own, dcp_error *err)
{
    dcp_status status = dcp_dict_create(NULL, &s->value, err);
    for (int i = 0; i < LAYERS && status == DCP_OK; i++) {
        status = add_layer(s, i, model.width, err);
    }
    status = status == DCP_OK ? add(s, "data.seen", SHARDED, DCP_INT64, 30, 0, err) : status;
    status = status == DCP_OK ? add(s, "optim.count", REPLICATED, DCP_INT64, 0, 0, err) : status;
    status = status == DCP_OK ? add_objects(s, err) : status;
    return status == DCP_OK && has_own ? add(s, DEMO_PER_RANK, OWN, DCP_UINT8, RNG_BYTES, 0, err) : status;
}

demo_state *demo_state_create(demo_model model, int rank, int ranks, int axis, bool filled, bool has_own, dcp_error *err)
{
    demo_state *s = calloc(1, sizeof *s);
    if (!s) {
        dcp_error_set(err, DCP_NOMEM, "out of memory");
        return NULL;
    }
    *s = (demo_state){.rank = rank, .ranks = ranks, .axis = axis, .filled = filled};
    if (build(s, model, has_own, err) != DCP_OK) {
        demo_state_free(s);
        return NULL;
    }
    return s;
}

dcp_value *demo_state_value(const demo_state *s)
{
    return s->value;
}

uint64_t demo_state_check(const demo_state *s, uint64_t *checked, const char **name)
{
    uint64_t wrong = count_wrong_objects(s->value);
    *checked = 3;
    *name = wrong ? "step, lr or config" : NULL;
    for (int i = 0; i < s->n_parts; i++) {
        uint64_t n = count_wrong(&s->parts[i]);
        *name = n && !*name ? s->parts[i].name : *name;
        *checked += (uint64_t)count_elems(&s->parts[i]);
        wrong += n;
    }
    return wrong;
}

void demo_state_free(demo_state *s)
{
    if (s) {
        dcp_value_free(s->value);
        for (int i = 0; i < s->n_parts; i++) {
            free(s->parts[i].data);
        }
        free(s);
    }
}
