dcp_test(conformance storage storage)
target_sources(test_storage PRIVATE ${PROJECT_SOURCE_DIR}/src/storage/template.c)
dcp_test(unit posix storage)
dcp_test(unit shims storage)
