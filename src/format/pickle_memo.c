#include "format/pickle_memo.h"

#include "base/bytes.h"
#include "format/pickle_ops.h"
#include "format/pickle_window.h"

void dcp__pmemo_init(dcp__pmemo *memo, dcp_context *ctx)
{
    *memo = (dcp__pmemo){.ctx = ctx};
}

void dcp__pmemo_reset(dcp__pmemo *memo)
{
    dcp__free(memo->ctx, memo->bits);
    dcp__free(memo->ctx, memo->ranks);
    dcp__free(memo->ctx, memo->values);
    dcp__pmemo_init(memo, memo->ctx);
}

typedef struct survey {
    dcp__pmemo *memo;
    dcp__pwindow window;
    uint64_t n;    /* memo entries so far */
    bool has_gaps; /* entries were put at numbers above n */
} survey;

/* Room for the bit of entry i. */
static dcp_status reserve_bit(dcp__pmemo *memo, uint64_t i, dcp_error *err)
{
    size_t had = memo->n_words, cap = had;
    void *bits = memo->bits;
    if (!dcp__grow(memo->ctx, &bits, &cap, (size_t)(i / 64 + 1), sizeof *memo->bits)) {
        return dcp__nomem(err);
    }
    memo->bits = bits;
    memset(memo->bits + had, 0, (cap - had) * sizeof *memo->bits);
    memo->n_words = cap;
    return DCP_OK;
}

static inline dcp_status fetch(survey *s, uint64_t i, const uint8_t *p, dcp_error *err)
{
    if (i >= s->n) {
        return dcp__fail_at(err, DCP_FORMAT, dcp__pwindow_position(&s->window, p),
                            "pickle: memo entry %llu is fetched before it is set", (unsigned long long)i);
    }
    if (i / 64 >= s->memo->n_words) {
        dcp_status status = reserve_bit(s->memo, i, err);
        if (status != DCP_OK) {
            return status;
        }
    }
    s->memo->bits[i / 64] |= (uint64_t)1 << (i % 64);
    return DCP_OK;
}

/* An entry is put at a number of the stream's choice. Real streams count up; a number beyond the position is hostile. */
static dcp_status put(survey *s, uint64_t i, const uint8_t *p, dcp_error *err)
{
    uint64_t position = dcp__pwindow_position(&s->window, p);
    if (i > position) {
        return dcp__fail_at(err, DCP_FORMAT, position, "pickle: memo entry %llu is more than the stream can hold",
                            (unsigned long long)i);
    }
    s->has_gaps |= i > s->n;
    s->n = i >= s->n ? i + 1 : s->n;
    return DCP_OK;
}

/* Passes over a payload that follows the opcode's own bytes. */
static dcp_status skip(survey *s, const uint8_t **p, size_t opcode_bytes, uint64_t payload_bytes, dcp_error *err)
{
    const uint8_t *payload = *p + opcode_bytes;
    if (payload_bytes <= (uint64_t)(s->window.end - payload)) {
        *p = payload + payload_bytes;
        return DCP_OK;
    }
    dcp_status status = dcp__pwindow_claim(&s->window, payload, payload_bytes, "a value", err);
    if (status != DCP_OK) {
        return status;
    }
    return dcp__pwindow_seek(&s->window, dcp__pwindow_position(&s->window, payload) + payload_bytes, p, err);
}

static dcp_status skip_global(survey *s, const uint8_t **p, dcp_error *err)
{
    size_t first, second;
    (*p)++;
    dcp_status status = dcp__pwindow_lines(&s->window, p, &first, &second, err);
    if (status == DCP_OK) {
        *p += first + second + 2;
    }
    return status;
}

static dcp_status refuse(const survey *s, const uint8_t *p, dcp_error *err)
{
    return dcp__fail_at(err, DCP_FORMAT, dcp__pwindow_position(&s->window, p), "pickle: opcode 0x%02x is not accepted", *p);
}

/* One opcode that needs more than a step forward. */
static dcp_status survey_rare(survey *s, const uint8_t **p, dcp_error *err)
{
    const uint8_t *q = *p;
    dcp_status status = DCP_OK;
    switch (*q) {
    case OP_BINPUT:
        status = put(s, q[1], q, err);
        *p = q + 2;
        return status;
    case OP_LONG_BINPUT:
        status = put(s, dcp__load32(q + 1), q, err);
        *p = q + 5;
        return status;
    case OP_GLOBAL: return skip_global(s, p, err);
    case OP_SHORT_BINSTRING:
    case OP_SHORT_BINBYTES: return skip(s, p, 2, q[1], err);
    case OP_BINSTRING:
    case OP_LONG4:
    case OP_BINBYTES:
    case OP_BINUNICODE: return skip(s, p, 5, dcp__load32(q + 1), err);
    case OP_BINBYTES8:
    case OP_BYTEARRAY8:
    case OP_BINUNICODE8: return skip(s, p, 9, dcp__load64(q + 1), err);
    default: return refuse(s, q, err);
    }
}

/* Walks to the end mark. The order of cases is that of frequency in real metadata, for readers; compilers make a table of it. */
static dcp_status survey_run(survey *s, const uint8_t *p, uint64_t *end, dcp_error *err)
{
    for (;;) {
        dcp_status status = DCP_OK;
        if (s->window.end - p < OP_MAX_BYTES) {
            status = dcp__pwindow_opcode(&s->window, &p, err);
            if (status != DCP_OK) {
                return status;
            }
        }
        switch (*p) {
        case OP_MEMOIZE:
            if (s->has_gaps) {
                return refuse(s, p, err); /* what number it would get depends on the reader */
            }
            s->n++;
            p++;
            break;
        case OP_BINGET:
            status = fetch(s, p[1], p, err);
            p += 2;
            break;
        case OP_LONG_BINGET:
            status = fetch(s, dcp__load32(p + 1), p, err);
            p += 5;
            break;
        case OP_MARK:
        case OP_EMPTY_TUPLE:
        case OP_POP:
        case OP_POP_MARK:
        case OP_DUP:
        case OP_NONE:
        case OP_BINPERSID:
        case OP_REDUCE:
        case OP_EMPTY_LIST:
        case OP_APPEND:
        case OP_BUILD:
        case OP_APPENDS:
        case OP_SETITEM:
        case OP_TUPLE:
        case OP_SETITEMS:
        case OP_EMPTY_DICT:
        case OP_NEWOBJ:
        case OP_TUPLE1:
        case OP_TUPLE2:
        case OP_TUPLE3:
        case OP_NEWTRUE:
        case OP_NEWFALSE:
        case OP_EMPTY_SET:
        case OP_ADDITEMS:
        case OP_FROZENSET:
        case OP_NEWOBJ_EX:
        case OP_STACK_GLOBAL: p++; break;
        case OP_PROTO:
        case OP_BININT1: p += 2; break;
        case OP_BININT2: p += 3; break;
        case OP_BININT: p += 5; break;
        case OP_FRAME:
        case OP_BINFLOAT: p += 9; break;
        case OP_LONG1:
        case OP_SHORT_BINUNICODE: status = skip(s, &p, 2, p[1], err); break;
        case OP_STOP: *end = dcp__pwindow_position(&s->window, p + 1); return DCP_OK;
        default: status = survey_rare(s, &p, err); break;
        }
        if (status != DCP_OK) {
            return status;
        }
    }
}

/* Counts the fetched entries before each word and makes room for their values. */
static dcp_status rank_bits(dcp__pmemo *memo, dcp_error *err)
{
    memo->ranks = dcp__alloc(memo->ctx, memo->n_words * sizeof *memo->ranks);
    if (!memo->ranks) {
        return dcp__nomem(err);
    }
    size_t n = 0;
    for (size_t i = 0; i < memo->n_words; i++) {
        memo->ranks[i] = (uint32_t)n;
        n += (size_t)__builtin_popcountll(memo->bits[i]);
    }
    memo->values = dcp__calloc(memo->ctx, n, sizeof *memo->values);
    memo->n_values = n;
    return memo->values ? DCP_OK : dcp__nomem(err);
}

dcp_status dcp__pmemo_survey(dcp__pmemo *memo, const dcp__source *src, uint64_t offset, uint64_t *end, dcp_error *err)
{
    survey s = {.memo = memo};
    const uint8_t *p;
    dcp_status status = dcp__pwindow_open(&s.window, memo->ctx, src, err);
    if (status != DCP_OK) {
        return status;
    }
    status = dcp__pwindow_seek(&s.window, offset, &p, err);
    if (status == DCP_OK) {
        status = survey_run(&s, p, end, err);
    }
    dcp__pwindow_close(&s.window);
    memo->n = s.n;
    return status == DCP_OK ? rank_bits(memo, err) : status;
}
