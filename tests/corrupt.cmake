# Damaged checkpoints, through the library and through the tool.
if(TARGET dcptool)
    foreach(name
            corrupt_metadata
            corrupt_pickles
            corrupt_records
            corrupt_sweep
            corrupt_layouts)
        dcp_test(corrupt ${name} engine PkgConfig::JANSSON PkgConfig::ZSTD)
        target_sources(test_${name} PRIVATE
            ${CMAKE_CURRENT_SOURCE_DIR}/corrupt/damage.c
            ${CMAKE_CURRENT_SOURCE_DIR}/corrupt/small.c
            ${CMAKE_CURRENT_SOURCE_DIR}/cli/tool.c)
        target_compile_definitions(test_${name} PRIVATE DCPTOOL="$<TARGET_FILE:dcptool>")
        add_dependencies(test_${name} dcptool)
        set_tests_properties(corrupt.${name} PROPERTIES TIMEOUT 900) # hundreds of processes
    endforeach()
endif()
