/* Names of Hugging Face files, taken apart: "shard-00001-model-00002-of-00003.safetensors". */
#ifndef DCP_ENGINE_HF_NAMES_H
#define DCP_ENGINE_HF_NAMES_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#define DCP__HF_DIGITS 5      /* at least */
#define DCP__HF_MOST_DIGITS 9 /* of what is taken for a number */

/* Takes a text and the number behind it off a name; false if it does not begin so. */
static inline bool dcp__hf_take(const char **name, const char *text, uint64_t *number)
{
    size_t len = strlen(text), digits = 0;
    if (strncmp(*name, text, len) != 0) {
        return false;
    }
    const char *at = *name + len;
    *number = 0;
    for (; at[digits] >= '0' && at[digits] <= '9' && digits <= DCP__HF_MOST_DIGITS; digits++) {
        *number = *number * 10 + (uint64_t)(at[digits] - '0');
    }
    *name = at + digits;
    return digits >= DCP__HF_DIGITS && digits <= DCP__HF_MOST_DIGITS;
}

#endif
