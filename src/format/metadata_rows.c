/* Objects of the metadata pickle become rows while it is read. An object that nobody else can reach is replaced on the stack, and
 * its nodes go back to the machine; a shared one keeps its node, with the row in the client word. */
#include "format/metadata_build.h"

dcp_status dcp__mrefuse(uint64_t at, const char *role, dcp__pv v, dcp_error *err)
{
    if (!v) {
        return dcp__fail_at(err, DCP_FORMAT, at, "metadata: %s is missing", role);
    }
    return dcp__fail_at(err, DCP_FORMAT, at, "metadata: %s is %s", role, dcp__mdescribe(v).text);
}

dcp_status dcp__mspend(dcp__mbuild *b, size_t n, uint64_t at, dcp_error *err)
{
    if (n > b->work_left) {
        return dcp__fail_at(err, DCP_LIMIT, at, "metadata: lists are shared so often that they hold more than the file");
    }
    b->work_left -= n;
    return DCP_OK;
}

dcp_status dcp__mstrings_add(dcp_context *ctx, dcp__mstrings *s, dcp_str text, uint32_t *number, bool *is_new, dcp_error *err)
{
    for (size_t i = s->last; i < s->n && i < s->last + 2; i++) {
        if (s->texts[i].len == text.len && memcmp(s->texts[i].ptr, text.ptr, text.len) == 0) {
            *number = (uint32_t)(s->last = i);
            *is_new = false;
            return DCP_OK;
        }
    }
    uint64_t existing;
    void *texts = s->texts;
    if (s->n >= UINT32_MAX - 1 || !dcp__grow(ctx, &texts, &s->cap, s->n + 1, sizeof *s->texts)) {
        return dcp__nomem(err);
    }
    s->texts = texts;
    dcp_status status = dcp__strmap_add(&s->map, text, s->n, &existing, err);
    if (status != DCP_OK) {
        return status;
    }
    *is_new = existing == UINT64_MAX;
    if (*is_new) {
        existing = s->n;
        s->texts[s->n++] = text;
    }
    s->last = (size_t)existing;
    *number = (uint32_t)existing;
    return DCP_OK;
}

/* Number of a string node among `strings`. The first node of a text is kept there, others go back. */
static dcp_status number_of(dcp__mbuild *b, dcp__pmachine *m, dcp__mstrings *strings, unsigned shift, dcp__pv str,
                            uint32_t *number, dcp_error *err)
{
    bool is_new = false;
    if (dcp__mstr_get(str, shift, number)) {
        return DCP_OK;
    }
    dcp_status status = dcp__mstrings_add(b->ctx, strings, dcp__pv_text(str), number, &is_new, err);
    if (status != DCP_OK) {
        return status;
    }
    if (is_new || dcp__pv_is_shared(str)) {
        dcp__mstr_set(str, shift, *number);
    } else {
        const char *kept = strings->texts[*number].ptr - offsetof(dcp__ptext, text);
        dcp__pmachine_replace(m, str, (dcp__pv)(uintptr_t)kept);
    }
    return DCP_OK;
}

/* A tuple of numbers >= 0. */
static dcp_status take_shape(dcp__pmachine *m, dcp__pv v, const char *role, const dcp__pints **out, dcp_error *err)
{
    dcp__pv made;
    uint64_t unused;
    if (dcp__mrow_of(v, &unused) == DCP__MROW_GIVEN_UP) {
        return dcp__pmachine_restart(m, err);
    }
    if (!v || !dcp__pv_is_node(v)) {
        return dcp__mrefuse(dcp__pmachine_position(m), role, v, err);
    }
    if (dcp__pv_node(v)->count > DCP_MAX_NDIM) {
        return dcp__fail_at(err, DCP_FORMAT, dcp__pmachine_position(m), "metadata: %s: %u dimensions, at most %d are possible",
                            role, dcp__pv_node(v)->count, DCP_MAX_NDIM);
    }
    dcp_status status = dcp__pmachine_ints(m, v, &made, err);
    if (status != DCP_OK) {
        return dcp__prefix(err, status, "metadata: %s: ", role);
    }
    const dcp__pints *ints = (const dcp__pints *)dcp__pv_node(made);
    for (uint32_t i = 0; i < ints->node.count; i++) {
        if (ints->values[i] < 0) {
            return dcp__fail_at(err, DCP_FORMAT, dcp__pmachine_position(m), "metadata: %s: %lld at position %u", role,
                                (long long)ints->values[i], i);
        }
    }
    *out = ints;
    return DCP_OK;
}

/* Whether two shapes are equal. */
static bool same_shape(const dcp__pints *a, const dcp__pints *b)
{
    return a->node.count == b->node.count && memcmp(a->values, b->values, a->node.count * sizeof *a->values) == 0;
}

static const dcp__pints *shape_of(const int64_t *values)
{
    return (const dcp__pints *)((const char *)values - offsetof(dcp__pints, values));
}

static dcp__pv pv_of(const dcp__pints *ints)
{
    return (dcp__pv)(uintptr_t)ints;
}

/* Replaces an object by its row, unless it is shared. */
static void settle(dcp__pv object, dcp__pv row, dcp__pv *out)
{
    dcp__pv_node(object)->client = row;
    if (!dcp__pv_is_shared(object)) {
        *out = row;
    }
}

static dcp_status check_box(dcp__pmachine *m, const dcp__pints *offsets, const dcp__pints *sizes, dcp_error *err)
{
    if (offsets->node.count != sizes->node.count) {
        return dcp__fail_at(err, DCP_FORMAT, dcp__pmachine_position(m), "metadata: chunk with %u offsets and %u sizes",
                            offsets->node.count, sizes->node.count);
    }
    for (uint32_t i = 0; i < sizes->node.count; i++) {
        int64_t end;
        if (!dcp__add_i64(offsets->values[i], sizes->values[i], &end)) {
            return dcp__fail_at(err, DCP_FORMAT, dcp__pmachine_position(m), "metadata: chunk of %lld at %lld in dimension %u",
                                (long long)sizes->values[i], (long long)offsets->values[i], i);
        }
    }
    return DCP_OK;
}

static dcp_status add_chunk(dcp__mbuild *b, const dcp__chunk *row, dcp_error *err)
{
    void *rows = b->md->chunks;
    if (!dcp__grow(b->ctx, &rows, &b->chunks_cap, b->md->n_chunks + 1, sizeof *row)) {
        return dcp__nomem(err);
    }
    b->md->chunks = rows;
    b->md->chunks[b->md->n_chunks++] = *row;
    return DCP_OK;
}

dcp_status dcp__mcopy_chunks(dcp__mbuild *b, size_t *first, size_t n, uint64_t at, dcp_error *err)
{
    size_t copied = b->md->n_chunks;
    dcp_status status = dcp__mspend(b, n, at, err);
    for (size_t i = 0; i < n && status == DCP_OK; i++) {
        dcp__chunk row = b->md->chunks[*first + i];
        status = add_chunk(b, &row, err);
    }
    *first = copied;
    return status;
}

static dcp_status build_chunk(dcp__mbuild *b, dcp__pmachine *m, dcp__pv *fields, dcp__pv *row, dcp_error *err)
{
    const dcp__pints *offsets, *sizes;
    dcp_status status = take_shape(m, fields[DCP__MFIELD_OFFSETS], "offsets of a chunk", &offsets, err);
    if (status == DCP_OK) {
        status = take_shape(m, fields[DCP__MFIELD_SIZES], "sizes of a chunk", &sizes, err);
    }
    if (status == DCP_OK) {
        status = check_box(m, offsets, sizes, err);
    }
    if (status != DCP_OK) {
        return status;
    }
    /* Chunks of one tensor mostly have one shape: keep it once. */
    const dcp__pints *last = b->md->n_chunks ? shape_of(b->md->chunks[b->md->n_chunks - 1].sizes) : NULL;
    if (last && last != sizes && same_shape(last, sizes)) {
        dcp__pmachine_replace(m, pv_of(sizes), pv_of(last));
        sizes = last;
    }
    *row = dcp__mrow_make(DCP__MROW_CHUNK, b->n_dropped + b->md->n_chunks);
    return add_chunk(b, &(dcp__chunk){offsets->values, sizes->values, DCP__NO_STORAGE}, err);
}

static dcp__pv pack_props(const dcp__mprops *p)
{
    uint64_t bits = (uint64_t)p->dtype | (uint64_t)p->memory_format << 8 | (uint64_t)p->requires_grad << 16 |
                    (uint64_t)p->pin_memory << 17 | (uint64_t)p->is_old_class << 18 | (uint64_t)p->has_strides << 19 |
                    (uint64_t)p->other_dtype << 20;
    return dcp__mrow_make(DCP__MROW_PROPERTIES, bits);
}

static dcp__mprops unpack_props(uint64_t bits)
{
    return (dcp__mprops){
        .dtype = (dcp_dtype)(bits & 0xff),
        .memory_format = (uint8_t)(bits >> 8 & 0xff),
        .requires_grad = bits >> 16 & 1,
        .pin_memory = bits >> 17 & 1,
        .is_old_class = bits >> 18 & 1,
        .has_strides = bits >> 19 & 1,
        .other_dtype = (uint32_t)(bits >> 20),
    };
}

/* A dtype of torch, known here or not. */
static dcp_status take_dtype(dcp__mbuild *b, dcp__pmachine *m, dcp__pv v, dcp__mprops *p, dcp_error *err)
{
    bool is_new;
    dcp__mclass is = dcp__mclass_of(v);
    if (is > DCP__MCLASS_DTYPE) {
        p->dtype = (dcp_dtype)(is - DCP__MCLASS_DTYPE);
        return DCP_OK;
    }
    if (is != DCP__MCLASS_OTHER_DTYPE) {
        return dcp__mrefuse(dcp__pmachine_position(m), "dtype of a tensor", v, err);
    }
    p->dtype = DCP_DTYPE_NONE;
    dcp_str name = dcp__arena_str(dcp__pmachine_arena(m), dcp__pv_global(v)->name);
    return name.ptr ? dcp__mstrings_add(b->ctx, &b->dtypes, name, &p->other_dtype, &is_new, err)
                    : dcp__arena_fail(dcp__pmachine_arena(m), err);
}

/* The state of TensorProperties is a tuple. */
static dcp_status build_props(dcp__mbuild *b, dcp__pmachine *m, bool is_old_class, dcp__pv state, dcp__pv *row, dcp_error *err)
{
    uint64_t at = dcp__pmachine_position(m), layout, format;
    size_t n = 0;
    const dcp__pv *items = dcp__pv_kind(state) == DCP__P_TUPLE ? dcp__pv_items(state, &n) : NULL;
    if (n != 5 && n != 6) {
        return dcp__fail_at(err, DCP_FORMAT, at, "metadata: tensor properties of %zu parts, 5 or 6 are known", n);
    }
    dcp__mprops props = {
        .requires_grad = items[2] == DCP__PV_TRUE,
        .pin_memory = items[4] == DCP__PV_TRUE,
        .is_old_class = is_old_class,
        .has_strides = n == 6,
    };
    dcp_status status = take_dtype(b, m, items[0], &props, err);
    if (status != DCP_OK) {
        return status;
    }
    if (dcp__mrow_of(items[1], &layout) != DCP__MROW_LAYOUT) {
        return dcp__mrefuse(at, "layout of a tensor", items[1], err);
    }
    if (dcp__mrow_of(items[3], &format) != DCP__MROW_MEMORY_FORMAT) {
        return dcp__mrefuse(at, "memory format of a tensor", items[3], err);
    }
    props.memory_format = (uint8_t)format;
    *row = pack_props(&props);
    return DCP_OK;
}

/* The row of a chunk in a list. */
static dcp_status find_chunk(dcp__mbuild *b, dcp__pmachine *m, dcp__pv v, const dcp__mtensor *t, size_t *out, dcp_error *err)
{
    uint64_t number;
    if (dcp__mrow_of(v, &number) != DCP__MROW_CHUNK) {
        return dcp__mrefuse(dcp__pmachine_position(m), "a chunk", v, err);
    }
    if (number < b->chunk_floor) {
        return dcp__pmachine_restart(m, err);
    }
    *out = (size_t)(number - b->n_dropped);
    uint32_t ndim = shape_of(b->md->chunks[*out].sizes)->node.count;
    if (ndim != t->size->node.count) {
        return dcp__fail_at(err, DCP_FORMAT, dcp__pmachine_position(m), "metadata: chunk of %u dimensions in a tensor of %u",
                            ndim, t->size->node.count);
    }
    return DCP_OK;
}

/* The chunks of a list as a run of rows: they mostly are one already, else copies are appended. */
static dcp_status take_chunks(dcp__mbuild *b, dcp__pmachine *m, dcp__pv list, dcp__mtensor *t, dcp_error *err)
{
    size_t n, row = 0, first = 0;
    const dcp__pv *items = dcp__pv_items(list, &n);
    bool is_run = true;
    dcp_status status = dcp__mspend(b, n, dcp__pmachine_position(m), err);
    for (size_t i = 0; i < n && status == DCP_OK; i++) {
        status = find_chunk(b, m, items[i], t, &row, err);
        first = i == 0 ? row : first;
        is_run &= row == first + i;
    }
    t->first_chunk = is_run ? first : b->md->n_chunks;
    t->n_chunks = n;
    for (size_t i = 0; !is_run && i < n && status == DCP_OK; i++) {
        status = find_chunk(b, m, items[i], t, &row, err);
        if (status == DCP_OK) {
            dcp__chunk copy = b->md->chunks[row];
            status = add_chunk(b, &copy, err);
        }
    }
    return status;
}

/* Takes the newest rows, those of a tensor that is not wanted, off the table again. */
static void drop_chunks(dcp__mbuild *b, const dcp__mtensor *t)
{
    b->md->n_chunks -= t->n_chunks;
    b->n_dropped += t->n_chunks;
    b->chunk_floor = b->n_dropped + b->md->n_chunks;
}

/* Whether the tensor that is being built will not be asked for: only a guess, by the key that it will probably have. */
static bool seems_unwanted(const dcp__mbuild *b, const dcp__pmachine *m)
{
    dcp__pv key = dcp__pmachine_below(m, 2);
    return b->only && !b->is_careful && key && dcp__pv_is_str(key) && !dcp__mis_wanted(b, dcp__pv_text(key));
}

static dcp_status add_tensor(dcp__mbuild *b, const dcp__mtensor *t, dcp__pv *row, dcp_error *err)
{
    void *rows = b->tensors;
    if (!dcp__grow(b->ctx, &rows, &b->tensors_cap, b->n_tensors + 1, sizeof *t)) {
        return dcp__nomem(err);
    }
    b->tensors = rows;
    *row = dcp__mrow_make(DCP__MROW_TENSOR, b->n_tensors);
    b->tensors[b->n_tensors++] = *t;
    return DCP_OK;
}

static dcp_status build_tensor(dcp__mbuild *b, dcp__pmachine *m, dcp__pv *fields, dcp__pv *row, dcp_error *err)
{
    dcp__mtensor t = {.n_chunks = 0};
    uint64_t at = dcp__pmachine_position(m), props;
    dcp__pv chunks = fields[DCP__MFIELD_CHUNKS];
    if (dcp__mrow_of(fields[DCP__MFIELD_PROPERTIES], &props) != DCP__MROW_PROPERTIES) {
        return dcp__mrefuse(at, "properties of a tensor", fields[DCP__MFIELD_PROPERTIES], err);
    }
    if (!chunks || dcp__pv_kind(chunks) != DCP__P_LIST) {
        return dcp__mrefuse(at, "the list of a tensor's chunks", chunks, err);
    }
    t.props = unpack_props(props);
    dcp_status status = take_shape(m, fields[DCP__MFIELD_SIZE], "size of a tensor", &t.size, err);
    if (status == DCP_OK) {
        status = take_chunks(b, m, chunks, &t, err);
    }
    if (status != DCP_OK) {
        return status;
    }
    b->has_old_properties |= t.props.is_old_class;
    b->has_new_properties |= !t.props.is_old_class;
    b->has_strides |= t.props.has_strides;
    dcp__pmachine_recycle(m, chunks);
    if (seems_unwanted(b, m) && t.first_chunk + t.n_chunks == b->md->n_chunks) {
        drop_chunks(b, &t);
        *row = dcp__mrow_make(DCP__MROW_TENSOR, DCP__MROW_UNWANTED);
        return DCP_OK;
    }
    return add_tensor(b, &t, row, err);
}

/* An index of an item that is not wanted needs no name or offset of its own. */
static void drop_index(dcp__mbuild *b, dcp__pmachine *m, dcp__pv fqn, dcp__pv offset)
{
    dcp_str text = dcp__pv_text(fqn);
    dcp__pv *kept = &b->unwanted[dcp__xxh3_64(text.ptr, text.len) % DCP__MUNWANTED];
    dcp_str same = *kept ? dcp__pv_text(*kept) : (dcp_str){NULL, 0};
    if (*kept != fqn && same.ptr && same.len == text.len && memcmp(same.ptr, text.ptr, text.len) == 0) {
        dcp__pmachine_replace(m, fqn, *kept);
    } else {
        *kept = fqn;
    }
    if (offset && dcp__pv_kind(offset) == DCP__P_INTS) {
        dcp__pmachine_replace(m, offset, dcp__mrow_make(DCP__MROW_GIVEN_UP, 0));
    }
}

static dcp_status add_index(dcp__mbuild *b, const dcp__mindex *made, dcp__pv *row, dcp_error *err)
{
    void *rows = b->indexes;
    if (b->n_indexes >= DCP__MROW_UNWANTED || !dcp__grow(b->ctx, &rows, &b->indexes_cap, b->n_indexes + 1, sizeof *made)) {
        return dcp__nomem(err);
    }
    b->indexes = rows;
    *row = dcp__mrow_make(DCP__MROW_INDEX, b->n_indexes);
    b->indexes[b->n_indexes++] = *made;
    return DCP_OK;
}

static dcp_status build_index(dcp__mbuild *b, dcp__pmachine *m, dcp__pv *fields, dcp__pv *row, dcp_error *err)
{
    dcp__pv fqn = fields[DCP__MFIELD_FQN], offset = fields[DCP__MFIELD_OFFSET], index = fields[DCP__MFIELD_INDEX];
    dcp__mindex made = {.hint = -1};
    int64_t hint;
    if (!fqn || !dcp__pv_is_str(fqn)) {
        return dcp__mrefuse(dcp__pmachine_position(m), "name of an index", fqn, err);
    }
    if (!dcp__mis_wanted(b, dcp__pv_text(fqn))) {
        drop_index(b, m, fqn, offset);
        *row = dcp__mrow_make(DCP__MROW_INDEX, DCP__MROW_UNWANTED);
        return DCP_OK;
    }
    if (index && dcp__pv_int(index, &hint) && hint >= 0 && hint <= INT32_MAX) {
        made.hint = (int32_t)hint;
    }
    if (offset && offset != DCP__PV_NONE) {
        dcp_status status = take_shape(m, offset, "offset of an index", &made.offset, err);
        if (status != DCP_OK) {
            return dcp__prefix(err, status, "item \"%s\": ", dcp__print(dcp__pv_text(fqn)).text);
        }
    }
    dcp_status status = number_of(b, m, &b->names, DCP__MSTR_NAME_SHIFT, fqn, &made.name, err);
    return status == DCP_OK ? add_index(b, &made, row, err) : status;
}

#define DESCRIPTORS_BYTES 1024

/* "a,b" of a list of strings. */
static dcp_status join_descriptors(dcp__pmachine *m, dcp__pv list, char text[DESCRIPTORS_BYTES], size_t *len, dcp_error *err)
{
    uint64_t at = dcp__pmachine_position(m);
    size_t n;
    const dcp__pv *items = dcp__pv_items(list, &n);
    *len = 0;
    for (size_t i = 0; i < n; i++) {
        dcp_str part = dcp__pv_text(items[i]);
        if (!dcp__pv_is_str(items[i]) || memchr(part.ptr, ',', part.len)) {
            return dcp__mrefuse(at, "a transform descriptor", items[i], err);
        }
        if (part.len >= DESCRIPTORS_BYTES - *len) {
            return dcp__fail_at(err, DCP_LIMIT, at, "metadata: transform descriptors of more than %d bytes", DESCRIPTORS_BYTES);
        }
        memcpy(text + *len, part.ptr, part.len);
        *len += part.len;
        text[(*len)++] = ',';
    }
    *len -= n ? 1 : 0;
    return DCP_OK;
}

/* Number of a text among the transforms. There are few distinct ones in a file. */
static dcp_status number_of_transforms(dcp__mbuild *b, dcp__pmachine *m, dcp_str text, uint16_t *out, dcp_error *err)
{
    dcp__metadata *md = b->md;
    for (size_t i = 0; i < md->n_transforms; i++) {
        if (md->transforms[i].len == text.len && memcmp(md->transforms[i].ptr, text.ptr, text.len) == 0) {
            *out = (uint16_t)i;
            return DCP_OK;
        }
    }
    void *rows = md->transforms;
    if (md->n_transforms > 255) {
        return dcp__fail_at(err, DCP_LIMIT, dcp__pmachine_position(m), "metadata: more than 255 lists of transforms");
    }
    if (!dcp__grow(b->ctx, &rows, &b->transforms_cap, md->n_transforms + 1, sizeof text)) {
        return dcp__nomem(err);
    }
    md->transforms = rows;
    text = dcp__arena_str(dcp__pmachine_arena(m), text);
    if (!text.ptr) {
        return dcp__arena_fail(dcp__pmachine_arena(m), err);
    }
    *out = (uint16_t)md->n_transforms;
    md->transforms[md->n_transforms++] = text;
    return DCP_OK;
}

static dcp_status take_descriptors(dcp__mbuild *b, dcp__pmachine *m, dcp__pv list, uint16_t *out, dcp_error *err)
{
    char text[DESCRIPTORS_BYTES];
    size_t len;
    *out = 0;
    if (!list || list == DCP__PV_NONE) {
        return DCP_OK;
    }
    dcp__pkind kind = dcp__pv_kind(list);
    if (kind != DCP__P_LIST && kind != DCP__P_TUPLE) {
        return dcp__mrefuse(dcp__pmachine_position(m), "list of transform descriptors", list, err);
    }
    b->has_descriptors = true;
    dcp_status status = join_descriptors(m, list, text, &len, err);
    if (status == DCP_OK) {
        status = number_of_transforms(b, m, (dcp_str){text, len}, out, err);
    }
    dcp__pmachine_recycle(m, list);
    return status;
}

static dcp_status take_range(dcp__pmachine *m, dcp__pv offset, dcp__pv length, dcp__storage *out, dcp_error *err)
{
    int64_t o, n, end;
    uint64_t at = dcp__pmachine_position(m);
    if (!offset || !dcp__pv_int(offset, &o)) {
        return dcp__mrefuse(at, "offset of a record", offset, err);
    }
    if (!length || !dcp__pv_int(length, &n)) {
        return dcp__mrefuse(at, "length of a record", length, err);
    }
    if (o < 0 || n < 0 || !dcp__add_i64(o, n, &end)) {
        return dcp__fail_at(err, DCP_FORMAT, at, "metadata: record of %lld bytes at %lld", (long long)n, (long long)o);
    }
    out->offset = (uint64_t)o;
    out->length = (uint64_t)n;
    return DCP_OK;
}

static dcp_status build_info(dcp__mbuild *b, dcp__pmachine *m, dcp__pv *fields, dcp__pv *row, dcp_error *err)
{
    dcp__storage made = {.form = DCP__FORM_RECORD};
    dcp__pv path = fields[DCP__MFIELD_RELATIVE_PATH];
    if (!path || !dcp__pv_is_str(path)) {
        return dcp__mrefuse(dcp__pmachine_position(m), "file of a record", path, err);
    }
    dcp_status status = take_range(m, fields[DCP__MFIELD_OFFSET], fields[DCP__MFIELD_LENGTH], &made, err);
    if (status == DCP_OK) {
        status = take_descriptors(b, m, fields[DCP__MFIELD_TRANSFORM_DESCRIPTORS], &made.transforms, err);
    }
    if (status == DCP_OK) {
        status = number_of(b, m, &b->files, DCP__MSTR_FILE_SHIFT, path, &made.file, err);
    }
    void *rows = b->md->storages;
    if (status != DCP_OK) {
        return status;
    }
    uint64_t key;
    if (!b->is_careful && dcp__mrow_of(dcp__pmachine_below(m, 2), &key) == DCP__MROW_INDEX && key == DCP__MROW_UNWANTED) {
        *row = dcp__mrow_make(DCP__MROW_INFO, DCP__MROW_UNWANTED);
        return DCP_OK;
    }
    if (b->md->n_storages >= DCP__NO_STORAGE || !dcp__grow(b->ctx, &rows, &b->storages_cap, b->md->n_storages + 1, sizeof made)) {
        return dcp__nomem(err);
    }
    b->md->storages = rows;
    *row = dcp__mrow_make(DCP__MROW_INFO, b->md->n_storages);
    b->md->storages[b->md->n_storages++] = made;
    return DCP_OK;
}

static dcp_status build_fields(dcp__mbuild *b, dcp__pmachine *m, dcp__mclass is, const dcp__pstate *state, dcp__pv *row,
                               dcp_error *err)
{
    dcp__pv fields[DCP__MFIELD_ROWS] = {0};
    size_t n;
    if (!dcp__mfields_of(state, fields, DCP__MFIELD_ROWS, &n)) {
        return dcp__mrefuse(dcp__pmachine_position(m), "state of an object", state->value, err);
    }
    dcp_status status = dcp__mspend(b, n, dcp__pmachine_position(m), err);
    if (status != DCP_OK) {
        return status;
    }
    switch (is) {
    case DCP__MCLASS_CHUNK: return build_chunk(b, m, fields, row, err);
    case DCP__MCLASS_TENSOR: return build_tensor(b, m, fields, row, err);
    case DCP__MCLASS_INDEX: return build_index(b, m, fields, row, err);
    default: return build_info(b, m, fields, row, err);
    }
}

/* BUILD: the classes that there are many of become rows, others keep their state as it is. */
static dcp_status on_build(void *user, dcp__pmachine *m, dcp__pv object, const dcp__pstate *state, dcp__pv *out, dcp_error *err)
{
    dcp__mbuild *b = user;
    dcp__mclass is = dcp__mclass_of_instance(object);
    dcp_status status;
    dcp__pv row = 0;
    switch (is) {
    case DCP__MCLASS_CHUNK:
    case DCP__MCLASS_TENSOR:
    case DCP__MCLASS_INDEX:
    case DCP__MCLASS_INFO: status = build_fields(b, m, is, state, &row, err); break;
    case DCP__MCLASS_PROPERTIES:
    case DCP__MCLASS_OLD_PROPERTIES: status = build_props(b, m, is == DCP__MCLASS_OLD_PROPERTIES, state->value, &row, err); break;
    default: return DCP_OK;
    }
    const dcp__pobject *o = dcp__pv_object(object);
    if (status == DCP_OK && dcp__pv_node(o->args)->count) {
        return dcp__fail_at(err, DCP_FORMAT, o->start, "metadata: %s with arguments", dcp__mdescribe(object).text);
    }
    if (status == DCP_OK) {
        settle(object, row, out);
    }
    return status;
}

/* torch.Size of one argument; in place if it can be. */
static dcp_status reduce_size(dcp__pmachine *m, const dcp__pv *args, size_t n, dcp__pv *out, dcp_error *err)
{
    dcp__pkind kind = n == 1 ? dcp__pv_kind(args[0]) : DCP__P_NONE;
    if ((kind != DCP__P_TUPLE && kind != DCP__P_LIST) || dcp__pv_node(args[0])->count > DCP_MAX_NDIM) {
        return DCP_OK; /* refused where a shape belongs */
    }
    return dcp__pmachine_ints(m, args[0], out, err);
}

static dcp_status on_reduce(void *user, dcp__pmachine *m, dcp__pv callable, const dcp__pv *args, size_t n, dcp__pv *out,
                            dcp_error *err)
{
    (void)user;
    int64_t value;
    switch (dcp__mclass_of(callable)) {
    case DCP__MCLASS_SIZE: return reduce_size(m, args, n, out, err);
    case DCP__MCLASS_LAYOUT:
        if (n == 1 && dcp__pv_is_str(args[0]) && strcmp(dcp__pv_text(args[0]).ptr, "torch.strided") == 0) {
            *out = dcp__mrow_make(DCP__MROW_LAYOUT, 0);
        }
        return DCP_OK;
    case DCP__MCLASS_MEMORY_FORMAT:
        if (n == 1 && dcp__pv_int(args[0], &value) && value >= 0 && value <= 2) {
            *out = dcp__mrow_make(DCP__MROW_MEMORY_FORMAT, (uint64_t)value);
        }
        return DCP_OK;
    default: return DCP_OK;
    }
}

void dcp__mbuild_reset(dcp__mbuild *b)
{
    b->work_left = b->source_bytes;
    b->n_dropped = b->chunk_floor = 0;
    memset(b->unwanted, 0, sizeof b->unwanted);
    b->n_tensors = b->n_indexes = b->md->n_chunks = b->md->n_storages = 0;
    b->md->n_transforms = 1;
    b->names.n = b->names.last = b->files.n = b->files.last = b->dtypes.n = b->dtypes.last = 0;
    dcp__strmap_reset(&b->names.map);
    dcp__strmap_reset(&b->files.map);
    dcp__strmap_reset(&b->dtypes.map);
    b->has_old_properties = b->has_new_properties = b->has_strides = b->has_descriptors = false;
}

static void on_restart(void *user)
{
    dcp__mbuild *b = user;
    b->is_careful = true;
    dcp__mbuild_reset(b);
}

/* In a dict of all items or all records, those that are not wanted need not stand. */
static bool on_pair(void *user, dcp__pv key, dcp__pv value)
{
    const dcp__mbuild *b = user;
    uint64_t number;
    if (dcp__mrow_of(key, &number) == DCP__MROW_INDEX) {
        return number != DCP__MROW_UNWANTED;
    }
    bool is_dropped = dcp__mrow_of(value, &number) == DCP__MROW_TENSOR && number == DCP__MROW_UNWANTED;
    return !is_dropped || !dcp__pv_is_str(key) || dcp__mis_wanted(b, dcp__pv_text(key));
}

/* The item that a value on the stack tells to be at work: of a tensor that is not complete the key stands below it, and of a
 * record the index that is its key. False if the value tells nothing. */
static bool name_at(const dcp__mbuild *b, const dcp__pmachine *m, size_t n, dcp_str *out)
{
    dcp__pv v = dcp__pmachine_stacked(m, n), below = dcp__pmachine_stacked(m, n + 1);
    uint64_t index;
    if (!v) {
        return false;
    }
    if (dcp__mclass_of_instance(v) == DCP__MCLASS_TENSOR && below && dcp__pv_is_str(below)) {
        *out = dcp__pv_text(below);
        return true;
    }
    if (dcp__mclass_of_instance(v) == DCP__MCLASS_INFO && below && dcp__mrow_of(below, &index) == DCP__MROW_INDEX &&
        index != DCP__MROW_UNWANTED) {
        *out = b->names.texts[b->indexes[index].name];
        return true;
    }
    return false;
}

static void on_failed(void *user, const dcp__pmachine *m, dcp_error *err)
{
    dcp_str name;
    for (size_t n = 0; err && dcp__pmachine_stacked(m, n); n++) {
        if (name_at(user, m, n, &name)) {
            dcp__prefix(err, err->code, "item \"%s\": ", dcp__print(name).text);
            return;
        }
    }
}

dcp__pickle_hooks dcp__mhooks(dcp__mbuild *b)
{
    return (dcp__pickle_hooks){
        .user = b,
        .reduce = on_reduce,
        .build = on_build,
        .keeps = b->only ? on_pair : NULL,
        .failed = on_failed,
        .restart = on_restart,
    };
}
