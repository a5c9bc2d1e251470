dcp_test(unit coverage plan)
