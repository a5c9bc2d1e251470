# Tests of the Python packages: unittest programs, run with the build tree's package.
function(dcp_python_test folder name)
    add_test(NAME python.${folder}.${name}
        COMMAND ${PROJECT_SOURCE_DIR}/tests/python/run.sh ${PROJECT_BINARY_DIR} ${folder}/test_${name}.py ${ARGN})
    set_tests_properties(python.${folder}.${name} PROPERTIES SKIP_RETURN_CODE 77 TIMEOUT 300 ENVIRONMENT "${DCP_PYTHON_TEST_ENV}")
endfunction()

# An interpreter without sanitizers loads theirs first. It keeps memory to its end, so leaks are counted by test_leaks.
if(TARGET dcp_python AND DCP_SANITIZE MATCHES address AND CMAKE_C_COMPILER_ID STREQUAL GNU AND NOT DCP_TEST_WRAPPER)
    set(preload)
    foreach(library asan ubsan)
        execute_process(COMMAND ${CMAKE_C_COMPILER} -print-file-name=lib${library}.so
            OUTPUT_VARIABLE place OUTPUT_STRIP_TRAILING_WHITESPACE)
        string(APPEND preload "${place} ")
    endforeach()
    set(DCP_PYTHON_TEST_ENV "DCP_PRELOAD=${preload}"
        "ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1" "PYTHONMALLOC=malloc")
    dcp_python_test(core extension)
    dcp_python_test(core background)
    foreach(name package golden slices interrupts leaks convert)
        dcp_python_test(core ${name} numpy)
    endforeach()
endif()

if(TARGET dcp_python AND NOT DCP_SANITIZE AND NOT DCP_TEST_WRAPPER)
    dcp_python_test(core extension)
    dcp_python_test(core background)
    dcp_python_test(core torch_objects torch)
    dcp_python_test(core package numpy)
    dcp_python_test(core golden numpy)
    dcp_python_test(core slices numpy)
    dcp_python_test(core interrupts numpy)
    dcp_python_test(core leaks numpy)
    dcp_python_test(core convert numpy)
    dcp_python_test(core devices)
    set_property(TEST python.core.devices APPEND PROPERTY ENVIRONMENT
        "LD_LIBRARY_PATH=${PROJECT_BINARY_DIR}/tests/devices/cuda:${PROJECT_BINARY_DIR}/tests/devices/acl")
    add_test(NAME python.wheel
        COMMAND ${PROJECT_SOURCE_DIR}/tests/python/wheel.sh ${PROJECT_SOURCE_DIR} ${PROJECT_BINARY_DIR})
    set_tests_properties(python.wheel PROPERTIES SKIP_RETURN_CODE 77 TIMEOUT 900)
    foreach(folder torch torch_convert torch_staging)
        if(EXISTS ${PROJECT_SOURCE_DIR}/tests/python/${folder}/CMakeLists.txt)
            add_subdirectory(python/${folder})
        endif()
    endforeach()
endif()
