/* Every initialiser of the public headers, as C11 and as C++17, with all warnings. Compiled only; check_initialisers.sh sees to
 * it that none is forgotten. */
#include <dcp/dcp.h>

extern void consume(const void *p);
void use_initialisers(void);

/* Each is used as C and C++ programs would: to define a variable, and to set one again. */
#define USE(type, initialiser)                                                                                                   \
    do {                                                                                                                         \
        type defined = initialiser;                                                                                              \
        const type kept = initialiser;                                                                                           \
        consume(&defined);                                                                                                       \
        consume(&kept);                                                                                                          \
    } while (0)

void use_initialisers(void)
{
    USE(dcp_error, DCP_ERROR_INIT);
    USE(dcp_limits, DCP_LIMITS_INIT);
    USE(dcp_context_opts, DCP_CONTEXT_OPTS_INIT);
    USE(dcp_comm_callbacks, DCP_COMM_CALLBACKS_INIT);
    USE(dcp_open_opts, DCP_OPEN_OPTS_INIT);
    USE(dcp_checkpoint_info, DCP_CHECKPOINT_INFO_INIT);
    USE(dcp_read_opts, DCP_READ_OPTS_INIT);
    USE(dcp_verify_opts, DCP_VERIFY_OPTS_INIT);
    USE(dcp_verify_report, DCP_VERIFY_REPORT_INIT);
    USE(dcp_load_opts, DCP_LOAD_OPTS_INIT);
    USE(dcp_load_report, DCP_LOAD_REPORT_INIT);
    USE(dcp_save_opts, DCP_SAVE_OPTS_INIT);
    USE(dcp_save_report, DCP_SAVE_REPORT_INIT);
    USE(dcp_reshard_opts, DCP_RESHARD_OPTS_INIT);
    USE(dcp_async_opts, DCP_ASYNC_OPTS_INIT);
    USE(dcp_stager_opts, DCP_STAGER_OPTS_INIT);
    USE(dcp_stager_info, DCP_STAGER_INFO_INIT);
    USE(dcp_host_opts, DCP_HOST_OPTS_INIT);
    USE(dcp_host_memory, DCP_HOST_MEMORY_INIT);
    USE(dcp_host_copy_opts, DCP_HOST_COPY_OPTS_INIT);
    USE(dcp_op_progress, DCP_OP_PROGRESS_INIT);
    USE(dcp_optimizer_opts, DCP_OPTIMIZER_OPTS_INIT);
    USE(dcp_diff_opts, DCP_DIFF_OPTS_INIT);
    USE(dcp_diff_report, DCP_DIFF_REPORT_INIT);
    USE(dcp_convert_opts, DCP_CONVERT_OPTS_INIT);
    USE(dcp_convert_report, DCP_CONVERT_REPORT_INIT);
    USE(dcp_hf_save_opts, DCP_HF_SAVE_OPTS_INIT);
    USE(dcp_hf_save_report, DCP_HF_SAVE_REPORT_INIT);
}
