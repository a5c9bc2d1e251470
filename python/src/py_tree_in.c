/* Python's containers to a tree of values, walked once.
 *
 * What becomes of a leaf depends on PyTorch's rule of flattening: dicts are always entered, a list only if a tensor or a dict is
 * somewhere below it through lists; all else is one object. An object that holds anything but exact builtins is stored by
 * pickle() as a whole. Whether a list is entered is known only after its elements have been seen, so that conversion of an
 * element may end in OPEN: it needs pickle(), as an element if the list is entered, else as part of the list. */
#include "core.h"

#include <string.h>

#define MAX_DEPTH 1000

typedef enum outcome {
    FAILED = -1,
    DONE, /* *out is the value */
    OPEN  /* there is none: only pickle() can store it */
} outcome;

typedef struct result {
    dcp_value *value;
    bool is_entered; /* tensors, mappings, and lists with such below */
} result;

/* A container that has been converted; shared ones stay shared. */
struct tree_memo {
    PyObject *object; /* held; NULL: an empty slot */
    bool in_object, is_open;
    result result;
};

/* A container on the way to where the walk is. */
struct tree_step {
    PyObject *container, *key; /* borrowed; key NULL: position */
    Py_ssize_t position;
};

static outcome convert(core_tree *t, PyObject *object, bool in_object, result *out);

/* ---- errors ---- */

static outcome fail_library(const dcp_error *err)
{
    errors_raise(err, NULL, NULL);
    return FAILED;
}

static outcome check(dcp_status status, const dcp_error *err)
{
    return status == DCP_OK ? DONE : fail_library(err);
}

/* "['model'][3]" */
static PyObject *where(const core_tree *t)
{
    PyObject *text = PyUnicode_FromString("state");
    for (size_t i = 0; text && i < t->path_len; i++) {
        const struct tree_step *s = &t->path[i];
        PyObject *longer =
            s->key ? PyUnicode_FromFormat("%U[%R]", text, s->key) : PyUnicode_FromFormat("%U[%zd]", text, s->position);
        Py_DECREF(text);
        text = longer;
    }
    return text;
}

static outcome fail(const core_tree *t, PyObject *type, const char *fmt, PyObject *detail)
{
    PyObject *place = where(t), *message = place ? PyUnicode_FromFormat(fmt, place, detail) : NULL;
    if (message) {
        PyErr_SetObject(type, message);
    }
    Py_XDECREF(place);
    Py_XDECREF(message);
    return FAILED;
}

/* What a descriptor of a node got wrong, with the node's place in front. */
static outcome fail_there(const core_tree *t)
{
    PyObject *exception = errors_fetch(), *place = where(t);
    PyObject *text = exception && place ? PyUnicode_FromFormat("%U: %S", place, exception) : NULL;
    PyObject *args = text ? PyTuple_Pack(1, text) : NULL;
    if (args) {
        PyObject_SetAttrString(exception, "args", args);
    }
    if (exception) {
        PyErr_SetObject((PyObject *)Py_TYPE(exception), exception);
    }
    Py_XDECREF(exception);
    Py_XDECREF(place);
    Py_XDECREF(text);
    Py_XDECREF(args);
    return FAILED;
}

/* ---- the way to where we are ---- */

static outcome enter(core_tree *t, PyObject *container)
{
    for (size_t i = 0; i < t->path_len; i++) {
        if (t->path[i].container == container) {
            return fail(t, PyExc_ValueError, "%U is a %R that contains itself", (PyObject *)Py_TYPE(container));
        }
    }
    if (t->path_len >= MAX_DEPTH) {
        return fail(t, PyExc_ValueError, "%U is nested too deeply: %R", (PyObject *)Py_TYPE(container));
    }
    if (t->path_len == t->path_cap) {
        size_t cap = t->path_cap ? 2 * t->path_cap : 16;
        struct tree_step *grown = PyMem_Realloc(t->path, cap * sizeof *grown);
        if (!grown) {
            PyErr_NoMemory();
            return FAILED;
        }
        t->path = grown;
        t->path_cap = cap;
    }
    t->path[t->path_len++] = (struct tree_step){.container = container};
    return DONE;
}

static void at_key(core_tree *t, PyObject *key)
{
    t->path[t->path_len - 1].key = key;
}

static void at_position(core_tree *t, Py_ssize_t i)
{
    t->path[t->path_len - 1].position = i;
}

static void leave(core_tree *t)
{
    t->path_len--;
}

/* ---- containers that were seen before ---- */

static struct tree_memo *slot_of(struct tree_memo *slots, size_t n_slots, PyObject *object, bool in_object)
{
    size_t i = ((uintptr_t)object >> 4) * 0x9E3779B97F4A7C15u >> 20;
    for (;; i++) {
        struct tree_memo *m = &slots[i & (n_slots - 1)];
        if (!m->object || (m->object == object && m->in_object == in_object)) {
            return m;
        }
    }
}

static outcome grow_memo(core_tree *t)
{
    size_t n = t->memo_slots ? 2 * t->memo_slots : 64;
    struct tree_memo *slots = PyMem_Calloc(n, sizeof *slots);
    if (!slots) {
        PyErr_NoMemory();
        return FAILED;
    }
    for (size_t i = 0; i < t->memo_slots; i++) {
        if (t->memo[i].object) {
            *slot_of(slots, n, t->memo[i].object, t->memo[i].in_object) = t->memo[i];
        }
    }
    PyMem_Free(t->memo);
    t->memo = slots;
    t->memo_slots = n;
    return DONE;
}

static bool recall(const core_tree *t, PyObject *object, bool in_object, result *out, bool *is_open)
{
    struct tree_memo *m = t->n_memo ? slot_of(t->memo, t->memo_slots, object, in_object) : NULL;
    if (!m || !m->object) {
        return false;
    }
    *out = m->result;
    *is_open = m->is_open;
    if (out->value) {
        dcp_value_retain(out->value);
    }
    return true;
}

static outcome remember(core_tree *t, PyObject *object, bool in_object, outcome o, const result *r)
{
    if (2 * t->n_memo >= t->memo_slots && grow_memo(t) == FAILED) {
        return FAILED;
    }
    struct tree_memo *m = slot_of(t->memo, t->memo_slots, object, in_object);
    *m = (struct tree_memo){Py_NewRef(object), in_object, o == OPEN, *r};
    if (r->value) {
        dcp_value_retain(r->value);
    }
    t->n_memo++;
    return o;
}

/* ---- leaves ---- */

/* Where something is loaded to, only the place counts. */
static outcome a_place(dcp_value **out)
{
    dcp_error err = DCP_ERROR_INIT;
    return check(dcp_bool_create(NULL, true, out, &err), &err);
}

/* The record that pickle() makes of an object. */
static outcome pickle(core_tree *t, PyObject *object, dcp_value **out)
{
    const void *bytes;
    size_t len;
    dcp_error err = DCP_ERROR_INIT;
    if (t->is_target) {
        return a_place(out);
    }
    if (!t->pickle) {
        return fail(t, PyExc_TypeError, "%U: %R cannot be stored in a checkpoint", (PyObject *)Py_TYPE(object));
    }
    PyObject *record = PyObject_CallFunctionObjArgs(t->pickle, object, NULL);
    int kept = record ? keep_bytes(&t->keep, record, &bytes, &len) : -1;
    Py_XDECREF(record);
    return kept < 0 ? FAILED : check(dcp_record_create(NULL, bytes, len, out, &err), &err);
}

static outcome note_leaf(core_tree *t, dcp_value *v, PyObject *object, bool is_described)
{
    if (t->n_leaves == t->cap_leaves) {
        size_t cap = t->cap_leaves ? 2 * t->cap_leaves : 64;
        core_leaf *grown = PyMem_Realloc(t->leaves, cap * sizeof *grown);
        if (!grown) {
            PyErr_NoMemory();
            return FAILED;
        }
        t->leaves = grown;
        t->cap_leaves = cap;
    }
    if (keep_object(&t->keep, object) < 0) {
        return FAILED;
    }
    t->leaves[t->n_leaves++] = (core_leaf){v, object, is_described};
    return DONE;
}

/* Inside an object, pickle() keeps more of a tensor than its elements. */
static outcome take_tensor(core_tree *t, PyObject *object, dcp_value *v, bool is_described, bool in_object, result *out)
{
    if (!v) {
        return FAILED;
    }
    if (in_object && t->pickle) {
        dcp_value_free(v);
        return OPEN;
    }
    *out = (result){v, true};
    return note_leaf(t, v, object, is_described);
}

/* Types of the caller's that are known to be tensors. */
static outcome from_known_tensor(core_tree *t, PyObject *object, bool in_object, bool *is_known, result *out)
{
    int64_t numbers[2 * DCP_MAX_NDIM];
    dcp_tensor tensor;
    dcp_value *v = NULL;
    dcp_error err = DCP_ERROR_INIT;
    int found = PyObject_CheckBuffer(object) ? tensor_from_buffer(&t->keep, object, t->is_target, &tensor, numbers)
                                             : tensor_from_torch(&t->keep, object, &tensor, numbers);
    *is_known = found > 0;
    if (found <= 0) {
        return found < 0 ? fail_there(t) : DONE;
    }
    if (dcp_tensor_create(NULL, &tensor, &v, &err) != DCP_OK) {
        return fail_library(&err);
    }
    return take_tensor(t, object, v, false, in_object, out);
}

static bool is_tensor_type(const core_tree *t, PyTypeObject *type)
{
    Py_ssize_t n = t->tensor_types ? PyTuple_Size(t->tensor_types) : 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        if (PyTuple_GetItem(t->tensor_types, i) == (PyObject *)type) {
            return true;
        }
    }
    return false;
}

/* ---- lists, tuples, sets ---- */

/* Positions of elements that only pickle() can store. */
typedef struct open_elements {
    Py_ssize_t *at;
    size_t n, cap;
} open_elements;

static outcome add_open(open_elements *o, Py_ssize_t i)
{
    if (o->n == o->cap) {
        size_t cap = o->cap ? 2 * o->cap : 16;
        Py_ssize_t *grown = PyMem_Realloc(o->at, cap * sizeof *grown);
        if (!grown) {
            PyErr_NoMemory();
            return FAILED;
        }
        o->at = grown;
        o->cap = cap;
    }
    o->at[o->n++] = i;
    return DONE;
}

static outcome append(core_tree *t, PyObject *element, bool in_object, Py_ssize_t i, dcp_value *seq, bool *is_entered,
                      open_elements *open)
{
    result r = {0};
    dcp_error err = DCP_ERROR_INIT;
    at_position(t, i);
    outcome o = convert(t, element, in_object, &r);
    if (o == OPEN) {
        o = add_open(open, i) == DONE ? a_place(&r.value) : FAILED;
    }
    if (o == DONE && dcp_list_append(seq, r.value, &err) != DCP_OK) {
        o = fail_library(&err);
    }
    if (o == FAILED) {
        dcp_value_free(r.value);
    }
    *is_entered |= r.is_entered;
    return o;
}

/* The list is entered: what is open in it are leaves of their own. */
static outcome close_elements(core_tree *t, PyObject *elements, dcp_value *seq, const open_elements *open)
{
    outcome o = DONE;
    for (size_t i = 0; i < open->n && o == DONE; i++) {
        dcp_value *v = NULL;
        dcp_error err = DCP_ERROR_INIT;
        at_position(t, open->at[i]);
        o = pickle(t, PyTuple_GetItem(elements, open->at[i]), &v);
        if (o == DONE && dcp_list_set(seq, (size_t)open->at[i], v, &err) != DCP_OK) {
            dcp_value_free(v);
            o = fail_library(&err);
        }
    }
    return o;
}

/* elements: a tuple, so that nobody changes it underway. */
static outcome from_elements(core_tree *t, PyObject *elements, dcp_kind kind, bool in_object, result *out)
{
    open_elements open = {0};
    dcp_error err = DCP_ERROR_INIT;
    bool is_entered = false, below_object = in_object || kind != DCP_KIND_LIST;
    Py_ssize_t n = PyTuple_Size(elements);
    dcp_value *seq;
    if (dcp_seq_create(NULL, kind, &seq, &err) != DCP_OK) {
        return fail_library(&err);
    }
    outcome o = DONE;
    for (Py_ssize_t i = 0; i < n && o == DONE; i++) {
        o = append(t, PyTuple_GetItem(elements, i), below_object, i, seq, &is_entered, &open);
    }
    is_entered &= !below_object;
    if (o == DONE && open.n) {
        o = is_entered ? close_elements(t, elements, seq, &open) : OPEN;
    }
    PyMem_Free(open.at);
    if (o != DONE) {
        dcp_value_free(seq);
        return o;
    }
    *out = (result){seq, is_entered};
    return DONE;
}

static outcome from_sequence(core_tree *t, PyObject *object, dcp_kind kind, bool in_object, result *out)
{
    if (t->is_target && kind != DCP_KIND_LIST) {
        return a_place(&out->value);
    }
    PyObject *elements = PySequence_Tuple(object);
    if (!elements) {
        return FAILED;
    }
    outcome o = enter(t, object);
    if (o == DONE) {
        o = from_elements(t, elements, kind, in_object, out);
        leave(t);
    }
    Py_DECREF(elements);
    return o;
}

/* ---- dicts ---- */

static outcome set_entry(core_tree *t, dcp_value *dict, dcp_key key, dcp_value *value)
{
    dcp_error err = DCP_ERROR_INIT;
    size_t n = dcp_value_count(dict);
    if (dcp_dict_set(dict, key, value, &err) != DCP_OK) {
        dcp_value_free(value);
        return fail_library(&err);
    }
    if (dcp_value_count(dict) == n) {
        return fail(t, PyExc_ValueError, "%U: two keys of this dict have the same name", Py_None);
    }
    return DONE;
}

/* Keys that are neither text nor a small integer become text where PyTorch makes them text: outside of objects. */
static outcome set_at_key(core_tree *t, dcp_value *dict, PyObject *key, bool in_object, dcp_value *value)
{
    int overflow = 0;
    PyTypeObject *type = Py_TYPE(key);
    if (type == &PyLong_Type) {
        long long i = PyLong_AsLongLongAndOverflow(key, &overflow);
        if (!overflow) {
            return set_entry(t, dict, dcp_key_int(i), value);
        }
    }
    dcp_str text;
    PyObject *holder = NULL;
    PyObject *name = type == &PyUnicode_Type ? Py_NewRef(key) : in_object ? NULL : PyObject_Str(key);
    if (!name || str_from_python(name, &text, &holder) < 0) {
        dcp_value_free(value);
        Py_XDECREF(name);
        return PyErr_Occurred() ? FAILED : OPEN;
    }
    outcome o = set_entry(t, dict, (dcp_key){.string = text}, value);
    Py_XDECREF(holder);
    Py_DECREF(name);
    return o;
}

static outcome from_entry(core_tree *t, dcp_value *dict, PyObject *key, PyObject *object, bool in_object)
{
    result r = {0};
    at_key(t, key);
    outcome o = convert(t, object, in_object, &r);
    if (o == OPEN && !in_object) {
        o = pickle(t, object, &r.value);
    }
    if (o != DONE) {
        dcp_value_free(r.value);
        return o;
    }
    return set_at_key(t, dict, key, in_object, r.value);
}

/* describe() may run any code, also code that changes the dict. */
static outcome from_exact_dict(core_tree *t, PyObject *object, bool in_object, dcp_value *dict)
{
    Py_ssize_t at = 0, n = PyDict_Size(object);
    PyObject *key, *value;
    outcome o = DONE;
    while (o == DONE && PyDict_Next(object, &at, &key, &value)) {
        Py_INCREF(key);
        Py_INCREF(value);
        o = from_entry(t, dict, key, value, in_object);
        at_key(t, NULL);
        Py_DECREF(key);
        Py_DECREF(value);
        if (o == DONE && PyDict_Size(object) != n) {
            o = fail(t, PyExc_RuntimeError, "%U changed while it was read", Py_None);
        }
    }
    return o;
}

static outcome from_items(core_tree *t, PyObject *mapping, bool in_object, dcp_value *dict)
{
    PyObject *view = PyObject_CallMethodObjArgs(mapping, names.items, NULL);
    PyObject *items = view ? PySequence_Tuple(view) : NULL;
    outcome o = items ? DONE : FAILED;
    for (Py_ssize_t i = 0; items && i < PyTuple_Size(items) && o == DONE; i++) {
        PyObject *pair = PyTuple_GetItem(items, i);
        if (!PyTuple_Check(pair) || PyTuple_Size(pair) != 2) {
            o = fail(t, PyExc_TypeError, "%U: items() gave %R", pair);
            break;
        }
        o = from_entry(t, dict, PyTuple_GetItem(pair, 0), PyTuple_GetItem(pair, 1), in_object);
        at_key(t, NULL);
    }
    Py_XDECREF(items);
    Py_XDECREF(view);
    return o;
}

static outcome from_mapping(core_tree *t, PyObject *object, dcp_kind kind, bool in_object, result *out)
{
    dcp_value *dict;
    dcp_error err = DCP_ERROR_INIT;
    if (t->is_target && in_object) {
        return a_place(&out->value);
    }
    dcp_status made =
        kind == DCP_KIND_ORDERED_DICT ? dcp_ordered_dict_create(NULL, &dict, &err) : dcp_dict_create(NULL, &dict, &err);
    if (made != DCP_OK) {
        return fail_library(&err);
    }
    outcome o = enter(t, object);
    if (o == DONE) {
        o = Py_TYPE(object) == &PyDict_Type ? from_exact_dict(t, object, in_object, dict)
                                            : from_items(t, object, in_object, dict);
        leave(t);
    }
    if (o != DONE) {
        dcp_value_free(dict);
        return o;
    }
    *out = (result){dict, true};
    return DONE;
}

/* ---- everything ---- */

static outcome from_description(core_tree *t, PyObject *object, PyObject *d, bool in_object, result *out)
{
    char kind = descriptor_kind(d);
    PyObject *container = (kind == 'm' || kind == 'l') && PyTuple_Size(d) == 2 ? PyTuple_GetItem(d, 1) : NULL;
    if (kind != 'm' && kind != 'l') {
        dcp_value *value = kind ? value_from_descriptor(&t->keep, d, t->is_target) : NULL;
        return value ? take_tensor(t, object, value, true, in_object, out) : fail_there(t);
    }
    if (!container) {
        return fail(t, PyExc_ValueError, "%U: wrong descriptor %R", d);
    }
    if (in_object && t->pickle) {
        return OPEN; /* its class matters */
    }
    return kind == 'm' ? from_mapping(t, container, DCP_KIND_DICT, in_object, out)
                       : from_sequence(t, container, DCP_KIND_LIST, in_object, out);
}

static outcome from_other(core_tree *t, PyObject *object, PyTypeObject *type, bool in_object, result *out)
{
    bool is_known = false;
    if (is_tensor_type(t, type)) {
        outcome o = from_known_tensor(t, object, in_object, &is_known, out);
        if (o != DONE || is_known) {
            return o;
        }
    }
    PyObject *d = PyObject_CallFunctionObjArgs(t->describe, object, NULL);
    outcome o = !d ? FAILED : d == Py_None ? OPEN : from_description(t, object, d, in_object, out);
    Py_XDECREF(d);
    if (o == OPEN && !t->pickle && !t->is_target) {
        return fail(t, PyExc_TypeError, "%U: %R cannot be stored in a checkpoint", (PyObject *)type);
    }
    return o;
}

static outcome from_container(core_tree *t, PyObject *object, dcp_kind kind, bool in_object, result *out)
{
    bool is_open;
    if (recall(t, object, in_object, out, &is_open)) {
        return is_open ? OPEN : DONE;
    }
    bool is_mapping = kind == DCP_KIND_DICT || kind == DCP_KIND_ORDERED_DICT;
    outcome o = is_mapping ? from_mapping(t, object, kind, in_object, out) : from_sequence(t, object, kind, in_object, out);
    return o == FAILED ? o : remember(t, object, in_object, o, out);
}

static dcp_kind container_kind(PyTypeObject *type)
{
    return type == &PyDict_Type         ? DCP_KIND_DICT
           : type == &PyList_Type       ? DCP_KIND_LIST
           : type == &PyTuple_Type      ? DCP_KIND_TUPLE
           : type == names.ordered_dict ? DCP_KIND_ORDERED_DICT
           : type == &PySet_Type        ? DCP_KIND_SET
           : type == &PyFrozenSet_Type  ? DCP_KIND_FROZENSET
                                        : DCP_KIND_NONE;
}

static outcome convert(core_tree *t, PyObject *object, bool in_object, result *out)
{
    bool is_scalar;
    PyTypeObject *type = Py_TYPE(object);
    dcp_kind kind = container_kind(type);
    *out = (result){0};
    if (kind != DCP_KIND_NONE) {
        return from_container(t, object, kind, in_object, out);
    }
    outcome o = scalar_from_python(object, &is_scalar, &out->value) < 0 ? FAILED : DONE;
    return is_scalar ? o : from_other(t, object, type, in_object, out);
}

int tree_begin(core_tree *t, PyObject *describe, PyObject *pickle, PyObject *tensor_types)
{
    *t = (core_tree){.describe = describe, .pickle = pickle == Py_None ? NULL : pickle, .tensor_types = tensor_types};
    if (!describe || !PyCallable_Check(describe) || (t->pickle && !PyCallable_Check(t->pickle))) {
        PyErr_SetString(PyExc_TypeError, "describe, and pickle if it is given, must be callable");
        return -1;
    }
    if (tensor_types && !PyTuple_Check(tensor_types)) {
        PyErr_SetString(PyExc_TypeError, "tensor_types must be a tuple");
        return -1;
    }
    return 0;
}

int tree_from_python(core_tree *t, PyObject *root)
{
    result r = {0};
    if (keep_init(&t->keep) < 0) {
        return -1;
    }
    outcome o = convert(t, root, false, &r);
    t->root = r.value;
    dcp_kind kind = r.value ? dcp_value_kind(r.value) : DCP_KIND_NONE;
    if (o != FAILED && kind != DCP_KIND_DICT && kind != DCP_KIND_ORDERED_DICT) {
        PyErr_Format(PyExc_TypeError, "the state must be a dict, not %R", (PyObject *)Py_TYPE(root));
        return -1;
    }
    return o == FAILED ? -1 : 0;
}

int tree_make(core_tree *t, PyObject *root, bool in_group, core_call *c, dcp_error *failed)
{
    if (tree_from_python(t, root) == 0 && stream_asked(t->stream, &t->stream_handle) == 0) {
        return 0;
    }
    if (!in_group) {
        return -1;
    }
    errors_take(&c->exception, failed); /* goes on to where the others learn of it */
    return 0;
}

void tree_reset(core_tree *t)
{
    for (size_t i = 0; i < t->memo_slots; i++) {
        Py_XDECREF(t->memo[i].object);
        dcp_value_free(t->memo[i].result.value);
    }
    PyMem_Free(t->memo);
    PyMem_Free(t->path);
    PyMem_Free(t->leaves);
    dcp_value_free(t->root);
    keep_reset(&t->keep);
    *t = (core_tree){0};
}

const core_leaf *tree_leaf_of(core_tree *t, const dcp_value *v)
{
    for (size_t i = 0; i < t->n_leaves; i++) {
        size_t at = (t->next_leaf + i) % t->n_leaves;
        if (t->leaves[at].value == v) {
            t->next_leaf = at + 1;
            return &t->leaves[at];
        }
    }
    return NULL;
}
