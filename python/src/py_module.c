/* The module libdcp._core: what the Python packages are made of. Python.h in its stable form for 3.11, so that one build serves
 * every later version. One interpreter in a process: names and types are kept in variables of the library. */
#include "core.h"

core_names names;

static int init_names(void)
{
    struct {
        PyObject **name;
        const char *text;
    } const all[] = {
        {&names.data_ptr, "data_ptr"},     {&names.dtype, "dtype"},
        {&names.is_conj, "is_conj"},       {&names.is_contiguous, "is_contiguous"},
        {&names.is_cpu, "is_cpu"},         {&names.is_neg, "is_neg"},
        {&names.layout, "layout"},         {&names.nbytes, "nbytes"},
        {&names.shape, "shape"},           {&names.storage_offset, "storage_offset"},
        {&names.stride, "stride"},         {&names.untyped_storage, "untyped_storage"},
        {&names.items, "items"},           {&names.release, "release"},
        {&names.from_bytes, "from_bytes"},
    };
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        *all[i].name = PyUnicode_InternFromString(all[i].text);
        if (!*all[i].name) {
            return -1;
        }
    }
    PyObject *collections = PyImport_ImportModule("collections");
    names.ordered_dict = collections ? (PyTypeObject *)PyObject_GetAttrString(collections, "OrderedDict") : NULL;
    Py_XDECREF(collections);
    return names.ordered_dict ? 0 : -1;
}

void *object_new(PyTypeObject *type)
{
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    return allocate(type, 0);
}

void object_free(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

#define WITH_KEYWORDS(function) (PyCFunction)(void (*)(void))(function), METH_VARARGS | METH_KEYWORDS

static PyMethodDef functions[] = {
    {"save", WITH_KEYWORDS(core_save), "Saves a dict as a checkpoint; see docs/design/python.md."},
    {"load", WITH_KEYWORDS(core_load), "Loads a checkpoint into a dict; see docs/design/python.md."},
    {"open", WITH_KEYWORDS(core_open),
     "open(path, *, rank=-1, check_crc=False, allow_outside=False, allow_shard_gaps=False)\n--\n\nOpens a checkpoint."},
    {"convert", WITH_KEYWORDS(core_convert), "Turns a checkpoint of any form into one of another; see docs/design/convert.md."},
    {"latest", core_latest, METH_O, "latest(path)\n--\n\nPath of the newest complete checkpoint directly below a directory."},
    {"claim", WITH_KEYWORDS(core_claim),
     "claim(path, *, overwrite=False, world=1, sync=True, save_id=None, checkpoint_id=None, target_release=0)\n--\n\n"
     "Claims the place of a save of `world` ranks that is planned and carried out by other means; the coordinator's. Excludes "
     "other\n"
     "saves to it until publish() or abort(). ExistsError if a checkpoint or another save is there."},
    {"write_items", WITH_KEYWORDS(core_write_items),
     "write_items(path, prefix, items, *, files=1, file_per_item=False, sync=True, transform=None, serialization='torch_save',\n"
     "threads=0, memory_bytes=0, align_payloads=False, progress=None, stream=None, helper=None,\n"
     "copy_ahead_bytes=...)\n--\n\n"
     "Writes tensor descriptors and finished records (bytes-like) to <prefix><n>.distcp, which must not be there yet. Returns\n"
     "(file, offset, length) of each. After a failure none of its files is left."},
    {"write_safetensors", WITH_KEYWORDS(core_write_safetensors),
     "write_safetensors(tree, describe, *, path=None, name=None, output=None, sync=True, stream=None)\n--\n\n"
     "Writes a dict of tensors and parts of tensors to one safetensors file: `name` in the directory `path`, or whatever "
     "output.write()\n"
     "takes. Returns {name: (offset, length)} of what has elements. After a failure there is no such file."},
    {"lower_priority", core_lower_priority, METH_NOARGS,
     "lower_priority()\n--\n\nThe calling thread, and those that it starts, run as batch work: lowest CPU priority, idle I/O "
     "class."},
    {"open_device", core_open_device, METH_O,
     "open_device(name)\n--\n\nLoads the vendor's library for a device (\"cuda:0\", \"npu\"), as a save or load of tensors on it "
     "does, and raises "
     "what that would raise: UnsupportedError where there is none."},
    {"copy_many", WITH_KEYWORDS(core_copy_many),
     "copy_many(copies, threads=2)\n--\n\nCopies host memory, given as (target address, source address, bytes). The caller keeps "
     "it alive."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "libdcp._core", .m_doc = "The C side of libdcp.", .m_size = -1, .m_methods = functions,
};

PyMODINIT_FUNC PyInit__core(void);

PyMODINIT_FUNC PyInit__core(void)
{
    PyObject *module = PyModule_Create(&definition);
    if (!module || init_names() < 0 || errors_init(module) < 0 || memory_init(module) < 0 || group_init(module) < 0 ||
        plan_cache_init(module) < 0 || checkpoint_init(module) < 0 || claim_init(module) < 0 || background_init(module) < 0 ||
        PyModule_AddStringConstant(module, "__version__", dcp_version()) < 0) {
        Py_XDECREF(module);
        return NULL;
    }
    return module;
}
