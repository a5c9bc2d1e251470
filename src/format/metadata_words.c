#include "format/metadata_words.h"

#include "format/pickle_emit.h"

#define METADATA "torch.distributed.checkpoint.metadata"
#define SHARD_METADATA "torch.distributed._shard.sharded_tensor.metadata"

typedef struct name {
    const char *module, *name;
} name;

static const name globals[DCP__N_GLOBALS] = {
    [DCP__W_METADATA] = {METADATA, "Metadata"},
    [DCP__W_TENSOR_STORAGE] = {METADATA, "TensorStorageMetadata"},
    [DCP__W_BYTES_STORAGE] = {METADATA, "BytesStorageMetadata"},
    [DCP__W_CHUNK] = {METADATA, "ChunkStorageMetadata"},
    [DCP__W_INDEX] = {METADATA, "MetadataIndex"},
    [DCP__W_STORAGE_INFO] = {"torch.distributed.checkpoint.filesystem", "_StorageInfo"},
    [DCP__W_SIZE] = {"torch", "Size"},
    [DCP__W_PROPERTIES] = {SHARD_METADATA, "TensorProperties"},
    [DCP__W_GET_LAYOUT] = {"torch.serialization", "_get_layout"},
    [DCP__W_MEMORY_FORMAT] = {SHARD_METADATA, "MEM_FORMAT_ENCODING"},
};

static const char *const texts[DCP__N_TEXTS] = {
    [DCP__W_KEY_PROPERTIES] = "properties",
    [DCP__W_KEY_SIZE] = "size",
    [DCP__W_KEY_CHUNKS] = "chunks",
    [DCP__W_KEY_OFFSETS] = "offsets",
    [DCP__W_KEY_SIZES] = "sizes",
    [DCP__W_KEY_FQN] = "fqn",
    [DCP__W_KEY_INDEX] = "index",
    [DCP__W_KEY_OFFSET] = "offset",
    [DCP__W_KEY_PATH] = "relative_path",
    [DCP__W_KEY_LENGTH] = "length",
    [DCP__W_KEY_TRANSFORMS] = "transform_descriptors",
};

void dcp__put_text(dcp__buf *out, dcp_str text)
{
    if (text.len <= UINT8_MAX) {
        dcp__emit_op(out, OP_SHORT_BINUNICODE, text.len, 1);
    } else if (text.len <= UINT32_MAX) {
        dcp__emit_op(out, OP_BINUNICODE, text.len, 4);
    } else {
        dcp__emit_op(out, OP_BINUNICODE8, text.len, 8);
    }
    dcp__buf_put(out, text.ptr, text.len);
}

void dcp__put_global(dcp__buf *out, const char *module, const char *name_)
{
    dcp__put_text(out, (dcp_str){module, strlen(module)});
    dcp__put_text(out, (dcp_str){name_, strlen(name_)});
    dcp__buf_put_byte(out, OP_STACK_GLOBAL);
}

static void keep(dcp__buf *out)
{
    dcp__buf_put_byte(out, OP_MEMOIZE);
    dcp__buf_put_byte(out, OP_POP);
}

static void put_class(dcp__buf *out, int word, bool is_new)
{
    name n = globals[word];
    if (is_new && word == DCP__W_PROPERTIES) {
        n.module = METADATA;
    }
    if (is_new && word == DCP__W_MEMORY_FORMAT) {
        n = (name){METADATA, "_MEM_FORMAT_ENCODING"};
    }
    dcp__put_global(out, n.module, n.name);
    keep(out);
}

void dcp__put_words(dcp__buf *out, bool is_new)
{
    for (int i = 0; i < DCP__N_GLOBALS; i++) {
        put_class(out, i, is_new);
    }
    for (int i = DCP__N_GLOBALS; i < DCP__N_TEXTS; i++) {
        dcp__put_text(out, (dcp_str){texts[i], strlen(texts[i])});
        keep(out);
    }
    dcp__emit_binget(out, DCP__W_GET_LAYOUT);
    dcp__put_text(out, (dcp_str){"torch.strided", 13});
    dcp__buf_put_byte(out, OP_TUPLE1);
    dcp__buf_put_byte(out, OP_REDUCE);
    keep(out);
    for (int i = 0; i < 3; i++) {
        dcp__emit_binget(out, DCP__W_MEMORY_FORMAT);
        dcp__emit_int(out, i);
        dcp__buf_put_byte(out, OP_TUPLE1);
        dcp__buf_put_byte(out, OP_REDUCE);
        keep(out);
    }
}
