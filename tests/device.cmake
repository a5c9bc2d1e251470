# Look-alikes of the vendors' libraries, each in a folder that the dynamic linker is told to search.
function(dcp_look_alike folder output source)
    add_library(${folder}_look_alike SHARED devices/${source} devices/core.c)
    target_link_libraries(${folder}_look_alike PRIVATE dcp_flags Threads::Threads)
    target_include_directories(${folder}_look_alike PRIVATE ${CMAKE_CURRENT_SOURCE_DIR})
    target_compile_definitions(${folder}_look_alike PRIVATE ${ARGN})
    target_compile_options(${folder}_look_alike PRIVATE -fvisibility=hidden)
    target_link_options(${folder}_look_alike PRIVATE -Wl,-Bsymbolic)
    set_target_properties(${folder}_look_alike PROPERTIES PREFIX "" SUFFIX "" OUTPUT_NAME ${output}
        LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/tests/devices/${folder})
endfunction()

dcp_look_alike(cuda libcuda.so.1 cuda.c)
dcp_look_alike(acl libascendcl.so ascendcl.c)
dcp_look_alike(acl_8_1 libascendcl.so ascendcl.c WITHOUT_V2)
dcp_look_alike(acl_broken libascendcl.so ascendcl.c WITHOUT_UNREGISTER)

# A test of cases that find the look-alikes by the ordinary names.
function(dcp_device_test name)
    dcp_test(device ${name} engine ${CMAKE_DL_LIBS})
    add_dependencies(test_${name} cuda_look_alike acl_look_alike acl_8_1_look_alike acl_broken_look_alike)
    target_compile_definitions(test_${name} PRIVATE DCP_LOOK_ALIKES="${PROJECT_BINARY_DIR}/tests/devices")
    set_property(TEST device.${name} APPEND PROPERTY ENVIRONMENT
        "LD_LIBRARY_PATH=${PROJECT_BINARY_DIR}/tests/devices/cuda:${PROJECT_BINARY_DIR}/tests/devices/acl")
    set_property(TEST device.${name} APPEND PROPERTY LABELS threads)
endfunction()

dcp_device_test(devices)
dcp_device_test(pinning)
dcp_device_test(search)

# The program of scripts/device-check.sh, here on the look-alikes.
add_executable(device_check device/device_check.c)
target_link_libraries(device_check PRIVATE dcp_engine dcp_flags ${CMAKE_DL_LIBS})
set_target_properties(device_check PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/tests)
add_dependencies(device_check cuda_look_alike acl_look_alike)
foreach(kind cuda npu)
    add_test(NAME device.check_${kind} COMMAND device_check ${kind} 8)
    set_tests_properties(device.check_${kind} PROPERTIES TIMEOUT 300 ENVIRONMENT
        "LD_LIBRARY_PATH=${PROJECT_BINARY_DIR}/tests/devices/cuda:${PROJECT_BINARY_DIR}/tests/devices/acl")
endforeach()
