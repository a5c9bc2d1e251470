/* Names in the metadata pickle: what its writer memoises first, so that each later use is a two-byte BINGET. */
#ifndef DCP_FORMAT_METADATA_WORDS_H
#define DCP_FORMAT_METADATA_WORDS_H

#include "base/buf.h"

/* Their values are their places in the memo. */
typedef enum dcp__word {
    /* classes and functions */
    DCP__W_METADATA,
    DCP__W_TENSOR_STORAGE,
    DCP__W_BYTES_STORAGE,
    DCP__W_CHUNK,
    DCP__W_INDEX,
    DCP__W_STORAGE_INFO,
    DCP__W_SIZE,
    DCP__W_PROPERTIES,
    DCP__W_GET_LAYOUT,
    DCP__W_MEMORY_FORMAT,
    DCP__N_GLOBALS,
    /* texts */
    DCP__W_KEY_PROPERTIES = DCP__N_GLOBALS,
    DCP__W_KEY_SIZE,
    DCP__W_KEY_CHUNKS,
    DCP__W_KEY_OFFSETS,
    DCP__W_KEY_SIZES,
    DCP__W_KEY_FQN,
    DCP__W_KEY_INDEX,
    DCP__W_KEY_OFFSET,
    DCP__W_KEY_PATH,
    DCP__W_KEY_LENGTH,
    DCP__W_KEY_TRANSFORMS,
    DCP__N_TEXTS,
    /* what is made of them */
    DCP__W_STRIDED = DCP__N_TEXTS,
    DCP__W_FORMATS, /* the three memory formats */
    DCP__N_WORDS = DCP__W_FORMATS + 3
} dcp__word;

/* Pushes, memoises and pops all of them. is_new: the classes of PyTorch 2.3 and newer. */
void dcp__put_words(dcp__buf *out, bool is_new);

/* SHORT_BINUNICODE and its longer relatives. */
void dcp__put_text(dcp__buf *out, dcp_str text);
/* STACK_GLOBAL. */
void dcp__put_global(dcp__buf *out, const char *module, const char *name);

#endif
