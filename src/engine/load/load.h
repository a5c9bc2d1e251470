/* The plan of a load: which item goes where in the state. */
#ifndef DCP_ENGINE_LOAD_H
#define DCP_ENGINE_LOAD_H

#include "dcp/load.h"
#include "engine/load/share.h"
#include "engine/read/checkpoint.h"

/* An object to be read and put at a path of the state. */
typedef struct dcp__object_target {
    const dcp_leaf *leaf;
    const dcp_item *item; /* NULL: all items below `name`, as one value */
    dcp_str name;         /* of the leaf in the checkpoint */
} dcp__object_target;

struct dcp_load_plan {
    dcp_context *ctx;
    dcp_value *state; /* borrowed */
    dcp_flat *flat;
    dcp__arena arena; /* names */
    dcp_read_request *requests;
    size_t n_requests, cap_requests;
    dcp__object_target *objects;
    size_t n_objects, cap_objects;
    dcp_value **converted; /* what is filled instead of tensors of the state; held */
    size_t n_converted, cap_converted;
    dcp_object_fn object; /* of the options, as are the next three */
    bool (*progress)(void *user, uint64_t done_bytes, uint64_t total_bytes);
    void *user;
    void *stream;
};

/* dcp_plan_load. is_dynamic: as under PyTorch's DynamicMetaLoadPlanner, the state says what its tensors are: other dtypes that
 * can be cast to those are no difference. What is no tensor is UNSUPPORTED then. */
dcp_status dcp__plan_load(dcp_checkpoint *ck, dcp_value *state, const dcp_load_opts *opts, bool is_dynamic, dcp_load_plan **out,
                          dcp_load_report *report, dcp_error *err);
/* ARG if they are of another version. */
dcp_status dcp__check_load_opts(const dcp_load_opts *opts, dcp_error *err);
/* After all has been read, which began at `start`. report may be NULL. */
void dcp__report_read(const dcp_load_plan *plan, dcp__share_bytes bytes, double start, dcp_load_report *report);
/* Of all targets. */
uint64_t dcp__bytes_of_requests(const dcp_read_request *requests, size_t n);

#endif
