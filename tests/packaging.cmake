# An installed libdcp as others find it. Sanitized libraries need a sanitized program, so these run in plain builds only.
if(NOT DCP_SANITIZE AND NOT DCP_COVERAGE)
    set(kinds shared static cmake)
    if(DCP_BUILD_CLI)
        list(APPEND kinds files)
    endif()
    foreach(kind IN LISTS kinds)
        add_test(NAME packaging.${kind}
            COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/packaging/install_and_use.sh ${kind} ${PROJECT_BINARY_DIR}
                ${CMAKE_CURRENT_SOURCE_DIR}/golden/2.13.0/sharded/ckpt ${CMAKE_C_COMPILER} ${CMAKE_INSTALL_LIBDIR})
        set_tests_properties(packaging.${kind} PROPERTIES TIMEOUT 300)
    endforeach()
    if(TARGET dcp_mpi)
        add_test(NAME packaging.mpi
            COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/packaging/install_and_use.sh mpi ${PROJECT_BINARY_DIR} "" ${MPI_C_COMPILER}
                ${CMAKE_INSTALL_LIBDIR} ${MPIEXEC_EXECUTABLE})
        set_tests_properties(packaging.mpi PROPERTIES TIMEOUT 300 ENVIRONMENT "${DCP_MPI_ENVIRONMENT}")
    endif()
endif()
