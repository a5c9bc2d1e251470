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

# The tool itself, as a process.
if(TARGET dcptool)
    foreach(name tool_hash tool_cat tool_list tool_usage tool_verify)
        dcp_test(cli ${name} base PkgConfig::JANSSON)
        target_sources(test_${name} PRIVATE ${PROJECT_SOURCE_DIR}/tests/cli/tool.c)
        target_compile_definitions(test_${name} PRIVATE DCPTOOL="$<TARGET_FILE:dcptool>")
        add_dependencies(test_${name} dcptool)
    endforeach()
    dcp_threaded_tests(cli.tool_hash)
endif()
