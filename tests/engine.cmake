dcp_test(engine read engine)
dcp_threaded_tests(engine.read)
dcp_test(engine save engine)
dcp_threaded_tests(engine.save)
