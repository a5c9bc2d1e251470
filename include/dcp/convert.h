/*
 * dcp/convert.h - compare checkpoints and turn one form into another.
 *
 *     dcp_diff_report report = DCP_DIFF_REPORT_INIT;
 *     dcp_diff(a, b, NULL, &report, &err);                       // two open checkpoints of any forms
 *     if (report.n_differences) { ... }
 *
 * Threads: the calls block, and use the threads of the context. The checkpoints may be used elsewhere at the same time.
 */
#ifndef DCP_CONVERT_H
#define DCP_CONVERT_H

#include "checkpoint.h"
#include "load.h"
#include "save.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- comparing ---- */

/* One difference. Valid for the call. */
typedef struct dcp_item_difference {
    dcp_difference_kind kind; /* MISSING: in a alone; UNEXPECTED: in b alone */
    const dcp_item *a, *b;    /* NULL where there is none */
    const char *text;         /* one line: "3 of 12 elements differ, by 0.5 at most, ..." */
    /* VALUE of tensors; DTYPE as well where both sides are numbers, which are compared all the same. */
    uint64_t n_different;    /* elements beyond the tolerances; 0: none, or not compared */
    const int64_t *first;    /* index of the first of them; NULL if there is none */
    double max_abs, max_rel; /* of them: |a - b| and |a - b| / |b|; infinite where NaN stands on one side, or |b| is 0 */
} dcp_item_difference;

typedef struct dcp_diff_opts {
    size_t struct_size;
    /* Elements are equal if |a - b| <= atol + rtol * |b|, or if both are NaN. With both 0 bits are compared: -0.0 and 0.0 differ.
     */
    double atol, rtol;
    void (*difference)(void *user, const dcp_item_difference *difference); /* in the order of a's items, then b's; may be NULL */
    /* Called now and then, from one thread at a time, with bytes done and in all; a false result cancels. NULL: none. */
    bool (*progress)(void *user, uint64_t done_bytes, uint64_t total_bytes);
    void *user;
} dcp_diff_opts;

#define DCP_DIFF_OPTS_INIT DCP_INIT(dcp_diff_opts)

typedef struct dcp_diff_report {
    size_t struct_size;
    size_t n_items;       /* names that both have */
    size_t n_differences; /* in all, and of each kind: */
    size_t n_missing, n_unexpected, n_shape, n_dtype, n_kind, n_value;
    double max_abs, max_rel; /* over all tensors */
    uint64_t bytes;          /* of the tensors compared, in a */
} dcp_diff_report;

#define DCP_DIFF_REPORT_INIT DCP_INIT(dcp_diff_report)

/* Compares two open checkpoints of any forms, item by item, in bounded memory. Items belong together by name and rank. DCP_OK
 * means that the comparison ran to its end: look at report->n_differences. opts may be NULL. Errors: ARG, CANCELED, those of
 * dcp_read and dcp_read_object. Local. */
DCP_API dcp_status dcp_diff(dcp_checkpoint *a, dcp_checkpoint *b, const dcp_diff_opts *opts, dcp_diff_report *report,
                            dcp_error *err);

#ifdef __cplusplus
}
#endif
#endif
