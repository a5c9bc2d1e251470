/* Puts small `.metadata` files together in every form that formats.md 2 knows: a tensor "w" of 4 x 3 in two chunks of rows, and
 * an object "step". Each option turns one thing into another. */
#ifndef TESTS_SUPPORT_METADATA_ASM_H
#define TESTS_SUPPORT_METADATA_ASM_H

#include "support/pickle_asm.h"

#define MD_CHECKPOINT "torch.distributed.checkpoint.metadata"
#define MD_SHARD "torch.distributed._shard.sharded_tensor.metadata"
#define MD_FILESYSTEM "torch.distributed.checkpoint.filesystem"

typedef enum md_hints { MD_HINTS_RIGHT = 0, MD_HINTS_NONE, MD_HINTS_WRONG, MD_HINTS_HUGE } md_hints;
typedef enum md_planner {
    MD_PLANNER_DICT = 0,
    MD_PLANNER_ABSENT,
    MD_PLANNER_NONE,
    MD_PLANNER_OPAQUE,
    MD_PLANNER_ORDERED
} md_planner;

/* Zero means the plain form of PyTorch 2.1 to 2.15. */
typedef struct md_form {
    bool is_protocol_2; /* GLOBAL, BINUNICODE, BINPUT */
    bool is_new_class;  /* TensorProperties of 2.3 */
    bool has_strides;   /* 6 properties */
    bool has_plain_tuples;
    bool is_slots_state; /* chunks with state (None, dict) */
    bool has_storage_meta, is_path_of_parts, is_path_of_python_3_13, has_version;
    bool has_bytes_state; /* BUILD of BytesStorageMetadata */
    bool has_twice_item;  /* "step", in a second group */
    bool has_extra_record, has_no_second_record, has_twice_record;
    bool is_shared_offset; /* the key has the chunk's own Size */
    md_hints hints;
    md_planner planner;
    int path_parts;     /* more keys in w's path */
    int64_t path_index; /* last item of w's path; 0: the string "w" instead */
    const char *transform, *transform_2;
    bool is_transform_of_second; /* chunk alone */
    const char *top_module, *top_name;
    const char *dtype_module, *dtype_name, *layout;
    const char *props_name, *chunk_module, *chunk_name, *index_name, *info_name, *tensor_name, *enum_name;
    int64_t enum_value;
    int64_t first_dim;                    /* 0: 4 */
    int64_t second_offset;                /* 0: 2 */
    int64_t second_rows;                  /* 0: 2 */
    int n_offsets;                        /* of the second chunk; 0: 2 */
    int64_t record_offset, record_length; /* of the second chunk's record; 0: 1000, 500 */
    int64_t second_again;                 /* offset of the record that the second chunk has twice; 0: 4000 */
    const char *second_path;              /* file of the second chunk's record; NULL: "sub/__1_0.distcp" */
    int64_t first_length;                 /* of the first chunk's record; 0: 900 */
    int64_t step_length;                  /* of the object's record; 0: 864 */
    bool has_str_length;
    const dcp__buf *own; /* opcodes of the value of the field libdcp */
} md_form;

static inline void md_str(dcp__buf *b, const md_form *f, const char *s)
{
    if (f->is_protocol_2) {
        pk_op(b, 'X');
        pk_u32(b, (uint32_t)strlen(s));
        dcp__buf_put(b, s, strlen(s));
    } else {
        pk_str(b, s);
    }
}
static inline void md_global(dcp__buf *b, const md_form *f, const char *module, const char *name)
{
    if (f->is_protocol_2) {
        dcp__buf_printf(b, "c%s\n%s\n", module, name);
    } else {
        pk_global(b, module, name);
    }
}
static inline void md_object(dcp__buf *b, const md_form *f, const char *module, const char *name)
{
    md_global(b, f, module, name);
    pk_raw(b, ")\x81");
}
static inline void md_size(dcp__buf *b, const md_form *f, const int64_t *v, size_t n)
{
    if (f->has_plain_tuples) {
        pk_tuple(b, v, n);
        return;
    }
    md_global(b, f, "torch", "Size");
    pk_tuple(b, v, n);
    pk_raw(b, "\x85R");
}
#define md_or(given, usual) ((given) ? (given) : (usual))

static inline void md_properties(dcp__buf *b, const md_form *f)
{
    const char *module = f->is_new_class ? MD_CHECKPOINT : MD_SHARD;
    md_object(b, f, module, md_or(f->props_name, "TensorProperties"));
    pk_op(b, '(');
    md_global(b, f, md_or(f->dtype_module, "torch"), md_or(f->dtype_name, "float32"));
    md_global(b, f, "torch.serialization", "_get_layout");
    md_str(b, f, md_or(f->layout, "torch.strided"));
    pk_raw(b, "\x85R\x89");
    md_global(b, f, module, md_or(f->enum_name, f->is_new_class ? "_MEM_FORMAT_ENCODING" : "MEM_FORMAT_ENCODING"));
    pk_int(b, f->enum_value);
    pk_raw(b, "\x85R\x88");
    if (f->has_strides) {
        pk_raw(b, "K\x03K\x01\x86");
    }
    pk_raw(b, "t\x62");
}
static inline void md_chunk(dcp__buf *b, const md_form *f, const int64_t offsets[2], int n_offsets, const int64_t sizes[2])
{
    md_object(b, f, md_or(f->chunk_module, MD_CHECKPOINT), md_or(f->chunk_name, "ChunkStorageMetadata"));
    if (f->is_slots_state) {
        pk_op(b, 'N');
    }
    pk_raw(b, "}(");
    md_str(b, f, "offsets");
    md_size(b, f, offsets, (size_t)n_offsets);
    if (f->is_shared_offset) {
        pk_raw(b, "q");
        pk_op(b, offsets[0] ? 1 : 0);
    }
    md_str(b, f, "sizes");
    md_size(b, f, sizes, 2);
    if (f->is_slots_state) {
        pk_raw(b, "u\x86\x62");
    } else {
        pk_raw(b, "ub");
    }
}
static inline void md_tensor(dcp__buf *b, const md_form *f)
{
    int64_t size[] = {md_or(f->first_dim, 4), 3}, zero[] = {0, 0}, rows[] = {2, 3};
    int64_t second[] = {md_or(f->second_offset, 2), 0}, second_rows[] = {md_or(f->second_rows, 2), 3};
    md_object(b, f, MD_CHECKPOINT, md_or(f->tensor_name, "TensorStorageMetadata"));
    pk_raw(b, "}(");
    md_str(b, f, "properties");
    md_properties(b, f);
    md_str(b, f, "size");
    md_size(b, f, size, 2);
    md_str(b, f, "chunks");
    pk_raw(b, "](");
    md_chunk(b, f, zero, 2, rows);
    md_chunk(b, f, second, md_or(f->n_offsets, 2), second_rows);
    pk_raw(b, "eub");
}
static inline void md_state_dict(dcp__buf *b, const md_form *f)
{
    pk_raw(b, "}(");
    md_str(b, f, "w");
    md_tensor(b, f);
    md_str(b, f, "step");
    md_object(b, f, MD_CHECKPOINT, "BytesStorageMetadata");
    if (f->has_bytes_state) {
        pk_raw(b, "}b");
    }
    if (f->has_twice_item) {
        pk_raw(b, "u(");
        md_str(b, f, "step");
        md_object(b, f, MD_CHECKPOINT, "BytesStorageMetadata");
    }
    pk_op(b, 'u');
}
static inline void md_planner_data(dcp__buf *b, const md_form *f)
{
    if (f->planner == MD_PLANNER_NONE) {
        pk_op(b, 'N');
        return;
    }
    if (f->planner == MD_PLANNER_OPAQUE) {
        md_object(b, f, "my.planner", "Plan");
        return;
    }
    if (f->planner == MD_PLANNER_ORDERED) {
        md_global(b, f, "collections", "OrderedDict");
        pk_raw(b, ")R(");
    } else {
        pk_raw(b, "}(");
    }
    md_str(b, f, "w");
    pk_op(b, '(');
    md_str(b, f, "model");
    pk_int(b, 7);
    for (int i = 0; i < f->path_parts; i++) {
        md_str(b, f, "x");
    }
    if (f->path_index) {
        pk_int(b, f->path_index);
    } else {
        md_str(b, f, "w");
    }
    pk_op(b, 't');
    md_str(b, f, "step");
    md_str(b, f, "step");
    pk_raw(b, "\x85u");
}
static inline void md_record(dcp__buf *b, const md_form *f, const char *fqn, int64_t hint, int64_t row, int64_t offset,
                             int64_t length)
{
    int64_t at[] = {row, 0};
    md_object(b, f, MD_CHECKPOINT, md_or(f->index_name, "MetadataIndex"));
    pk_raw(b, "}(");
    md_str(b, f, "fqn");
    md_str(b, f, fqn);
    if (f->hints != MD_HINTS_NONE && hint >= 0) {
        md_str(b, f, "index");
        pk_int(b, f->hints == MD_HINTS_WRONG ? 1 - hint : f->hints == MD_HINTS_HUGE ? INT64_MAX - hint : hint);
    }
    if (row >= 0) {
        md_str(b, f, "offset");
        if (f->is_shared_offset) {
            pk_op(b, 'h');
            pk_op(b, row ? 1 : 0);
        } else {
            md_size(b, f, at, 2);
        }
    }
    pk_raw(b, "ub");
    md_object(b, f, MD_FILESYSTEM, md_or(f->info_name, "_StorageInfo"));
    pk_raw(b, "}(");
    md_str(b, f, "relative_path");
    md_str(b, f, row > 0 ? md_or(f->second_path, "sub/__1_0.distcp") : "__0_0.distcp");
    md_str(b, f, "offset");
    pk_int(b, offset);
    md_str(b, f, "length");
    if (f->has_str_length) {
        md_str(b, f, "5");
    } else {
        pk_int(b, length);
    }
    if (f->transform && (row > 0 || !f->is_transform_of_second)) {
        md_str(b, f, "transform_descriptors");
        pk_raw(b, "](");
        md_str(b, f, f->transform);
        if (f->transform_2) {
            md_str(b, f, f->transform_2);
        }
        pk_op(b, 'e');
    }
    pk_raw(b, "ub");
}
static inline void md_storage_data(dcp__buf *b, const md_form *f)
{
    int64_t second = md_or(f->second_offset, 2);
    pk_raw(b, "}(");
    md_record(b, f, "w", 0, 0, 0, md_or(f->first_length, 900));
    if (!f->has_no_second_record) {
        md_record(b, f, "w", 1, second, md_or(f->record_offset, 1000), md_or(f->record_length, 500));
    }
    if (f->has_extra_record) {
        md_record(b, f, "w", 2, 77, 5000, 6);
        md_record(b, f, "ghost", 0, 0, 6000, 7);
    }
    md_record(b, f, "step", -1, -1, 2000, md_or(f->step_length, 864));
    if (f->has_twice_record) { /* a second group, as in dicts of more than 1000 */
        pk_raw(b, "u(");
        md_record(b, f, "w", 1, second, md_or(f->second_again, 4000), md_or(f->record_length, 500));
    }
    pk_op(b, 'u');
}
static inline void md_storage_meta(dcp__buf *b, const md_form *f)
{
    md_object(b, f, MD_CHECKPOINT, "StorageMeta");
    pk_raw(b, "}(");
    md_str(b, f, "checkpoint_id");
    if (f->is_path_of_parts) {
        md_global(b, f, "pathlib", "PosixPath");
        pk_op(b, '(');
        md_str(b, f, "/");
        md_str(b, f, "runs");
        md_str(b, f, "step 7");
        pk_raw(b, "tR");
    } else if (f->is_path_of_python_3_13) {
        md_global(b, f, "pathlib._local", "PosixPath");
        md_str(b, f, "/runs/step 7");
        pk_raw(b, "\x85R");
    } else {
        md_str(b, f, "/runs/step 7");
    }
    md_str(b, f, "save_id");
    md_str(b, f, "abc-1");
    md_str(b, f, "load_id");
    pk_op(b, 'N');
    md_str(b, f, "modules");
    pk_raw(b, "]ub");
}
static inline void md_make(dcp__buf *b, const md_form *f)
{
    pk_raw(b, "\x80");
    pk_op(b, f->is_protocol_2 ? 2 : 4);
    md_object(b, f, md_or(f->top_module, MD_CHECKPOINT), md_or(f->top_name, "Metadata"));
    pk_raw(b, "}(");
    md_str(b, f, "state_dict_metadata");
    md_state_dict(b, f);
    if (f->planner != MD_PLANNER_ABSENT) {
        md_str(b, f, "planner_data");
        md_planner_data(b, f);
    }
    md_str(b, f, "storage_data");
    md_storage_data(b, f);
    if (f->has_storage_meta) {
        md_str(b, f, "storage_meta");
        md_storage_meta(b, f);
    }
    if (f->has_version) {
        md_str(b, f, "version");
        md_str(b, f, "1.0.0");
    }
    if (f->own) {
        md_str(b, f, "libdcp");
        dcp__buf_put(b, f->own->data, f->own->len);
    }
    pk_raw(b, "ub.");
}

#endif
