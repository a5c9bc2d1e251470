/* Every initialiser of the public headers, as C11 and as C++17, with all warnings. Compiled only. */
#include <dcp/dcp.h>

extern void consume(const void *p);
void use_initialisers(void);

void use_initialisers(void)
{
    dcp_error err = DCP_ERROR_INIT;
    dcp_limits limits = DCP_LIMITS_INIT;
    dcp_context_opts context = DCP_CONTEXT_OPTS_INIT;
    dcp_open_opts open_opts = DCP_OPEN_OPTS_INIT;
    dcp_checkpoint_info info = DCP_CHECKPOINT_INFO_INIT;
    dcp_verify_opts verify = DCP_VERIFY_OPTS_INIT;
    dcp_verify_report report = DCP_VERIFY_REPORT_INIT;
    dcp_comm_callbacks callbacks = DCP_COMM_CALLBACKS_INIT;
    consume(&err);
    consume(&limits);
    consume(&context);
    consume(&open_opts);
    consume(&info);
    consume(&verify);
    consume(&report);
    consume(&callbacks);
}
