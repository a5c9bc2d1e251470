dcp_test(conformance comm comm)
dcp_test(unit comm_handles comm)
dcp_threaded_tests(conformance.comm unit.comm_handles)
# Valgrind runs one of 64 threads at a time.
set_tests_properties(conformance.comm PROPERTIES TIMEOUT 900)

# As root, on fewer cores than ranks, and in containers that forbid reading another process's memory.
set(DCP_MPI_ENVIRONMENT OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
    OMPI_MCA_btl_vader_single_copy_mechanism=none OMPI_MCA_btl_base_warn_component_unused=0 UCX_LOG_LEVEL=error)

# One program of tests/mpi with one MPI, on each number of ranks that is listed ("2:x": argument x).
function(dcp_mpi_program mpi program layer)
    set(target test_${program}_${mpi})
    add_executable(${target} ${CMAKE_CURRENT_SOURCE_DIR}/mpi/test_${program}.c ${DCP_MPI_SOURCES})
    target_link_libraries(${target} PRIVATE dcp_${layer} dcp_flags PkgConfig::CMOCKA PkgConfig::${mpi})
    target_include_directories(${target} PRIVATE ${CMAKE_CURRENT_SOURCE_DIR})
    set_target_properties(${target} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/tests)
    foreach(run ${ARGN})
        string(REPLACE ":" ";" args ${run})
        list(POP_FRONT args ranks)
        string(REPLACE ":" "_" label ${run})
        add_test(NAME ${program}.${mpi}.${label} COMMAND ${DCP_MPIEXEC_${mpi}} -n ${ranks} $<TARGET_FILE:${target}> ${args})
        # MPI keeps memory to the end.
        set_tests_properties(${program}.${mpi}.${label} PROPERTIES TIMEOUT 300 PROCESSORS 2
            ENVIRONMENT "${DCP_MPI_ENVIRONMENT};ASAN_OPTIONS=allocator_may_return_null=1:detect_leaks=0")
    endforeach()
endfunction()

# The sources of libdcp_mpi with the MPI of a pkg-config module, run by its launcher on 1 to 4 ranks.
function(dcp_mpi_tests name module)
    find_program(DCP_MPIEXEC_${name} NAMES ${ARGN} DOC "Launcher for the tests with ${name}")
    mark_as_advanced(DCP_MPIEXEC_${name})
    pkg_check_modules(${name} QUIET IMPORTED_TARGET ${module})
    if(NOT ${name}_FOUND OR NOT DCP_MPIEXEC_${name})
        add_test(NAME mpi.${name} COMMAND sh -c "echo 'not installed: ${name}'; exit 77")
        set_tests_properties(mpi.${name} PROPERTIES SKIP_RETURN_CODE 77)
        return()
    endif()
    dcp_mpi_program(${name} mpi comm 1 2 3 4 2:funneled)
    dcp_mpi_program(${name} mpi_save engine 1 2 3 4)
endfunction()

if(DCP_BUILD_MPI)
    dcp_mpi_tests(openmpi ompi-c mpiexec.openmpi orterun)
    dcp_mpi_tests(mpich mpich mpiexec.mpich mpiexec.hydra)
endif()
