dcp_test(unit coverage plan)
dcp_test(unit global_plan plan m)
dcp_test(unit layout plan)
