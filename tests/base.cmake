dcp_test(unit base base)
dcp_test(unit hash base)
dcp_test(unit pool base)
dcp_test(unit strmap base)
