# The parts of dcptool that need no checkpoint, each linked with the sources that it is made of.
if(DCP_BUILD_CLI)
    function(dcp_cli_part_test name)
        dcp_test(cli ${name} state)
        list(TRANSFORM ARGN PREPEND ${PROJECT_SOURCE_DIR}/cli/)
        target_sources(test_${name} PRIVATE ${ARGN})
        target_include_directories(test_${name} PRIVATE ${PROJECT_SOURCE_DIR}/cli)
    endfunction()

    dcp_cli_part_test(cli_slice slice.c)
    dcp_cli_part_test(cli_element element.c json_writer.c escape.c memory.c output.c summary.c nested_json.c)
    dcp_cli_part_test(cli_text escape.c json_writer.c memory.c output.c npy.c)
endif()
