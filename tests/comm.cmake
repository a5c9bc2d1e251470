dcp_test(conformance comm comm)
dcp_test(unit comm_handles comm)
dcp_threaded_tests(conformance.comm unit.comm_handles)
