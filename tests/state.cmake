dcp_test(unit value state)
dcp_test(unit tensor_value state)
dcp_test(unit strided state)
dcp_threaded_tests(unit.value)
