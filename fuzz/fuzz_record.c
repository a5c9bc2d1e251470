/* Records and torch.save files of both forms. The two ways to a payload must agree, and a payload must lie within the file. */
#include "base/context.h"
#include "format/record.h"

static dcp_status read_slowly(const dcp__source *self, uint64_t offset, void *buf, size_t n, dcp_error *err)
{
    (void)err;
    memcpy(buf, (const char *)self->user + offset, n);
    return DCP_OK;
}

static void check(bool holds)
{
    if (!holds) {
        __builtin_trap();
    }
}

static void check_payload(const dcp__payload *p, uint64_t size)
{
    check(p->ndim >= 0 && p->ndim <= DCP_MAX_NDIM && dcp_dtype_bytes(p->dtype) > 0);
    check(dcp__range_fits(p->storage.offset, p->storage.bytes, size));
    check(p->offset >= p->storage.offset);
    check(dcp__range_fits(p->offset - p->storage.offset, p->span_bytes, p->storage.full_bytes));
}

static void check_archive(dcp_context *ctx, const dcp__source *src, bool is_record, const dcp__payload *p)
{
    dcp__archive a;
    dcp__payload q;
    if (dcp__archive_open(ctx, src, &a, NULL)) {
        check(!is_record);
        return;
    }
    if (dcp_value_kind(a.object.value) == DCP_KIND_TENSOR && !dcp__archive_payload(&a, a.object.value, &q, NULL)) {
        check(is_record && p->offset == q.offset && p->span_bytes == q.span_bytes && p->dtype == q.dtype && p->ndim == q.ndim);
    } else {
        check(!is_record);
    }
    dcp__archive_reset(&a);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    dcp_context *ctx = dcp__context(NULL);
    dcp__source src = dcp__source_memory(data, size);
    dcp__source slow = {.read = read_slowly, .size = size, .user = (void *)(uintptr_t)data};
    dcp__payload p, q;
    dcp_status st = dcp__record_payload(ctx, &src, &p, NULL);
    check(dcp__record_payload(ctx, &slow, &q, NULL) == st);
    if (!st) {
        check_payload(&p, size);
        check(p.offset == q.offset && p.span_bytes == q.span_bytes);
    }
    check_archive(ctx, &src, !st, &p);
    return 0;
}
