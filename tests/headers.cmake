# What a user of the headers relies on, and the arrows between our layers.
set(strict -Wall -Wextra -Wpedantic -Wshadow -Werror -fsyntax-only -I${PROJECT_SOURCE_DIR}/include)
find_program(DCP_CXX NAMES c++ g++ clang++ clang++-14 DOC "C++ compiler for the tests of the headers")
mark_as_advanced(DCP_CXX)

# A public header, or a source that uses them, passes the compilers alone. Further arguments are options.
function(dcp_header_test name file)
    add_test(NAME headers.${name}.c11 COMMAND ${CMAKE_C_COMPILER} -x c -std=c11 ${strict} ${ARGN} ${file})
    if(DCP_CXX)
        add_test(NAME headers.${name}.cxx17 COMMAND ${DCP_CXX} -x c++ -std=c++17 ${strict} ${ARGN} ${file})
    else()
        add_test(NAME headers.${name}.cxx17 COMMAND sh -c "echo 'no C++ compiler'; exit 77")
        set_tests_properties(headers.${name}.cxx17 PROPERTIES SKIP_RETURN_CODE 77)
    endif()
endfunction()

file(GLOB public_headers CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/include/dcp/*.h)
# This one belongs to libdcp_mpi.
set(mpi_header ${PROJECT_SOURCE_DIR}/include/dcp/mpi.h)
list(REMOVE_ITEM public_headers ${mpi_header})
foreach(header IN LISTS public_headers)
    get_filename_component(name ${header} NAME_WE)
    dcp_header_test(${name} ${header})
endforeach()
if(TARGET dcp_mpi)
    list(TRANSFORM MPI_C_INCLUDE_DIRS PREPEND "-isystem" OUTPUT_VARIABLE mpi_includes)
    dcp_header_test(mpi ${mpi_header} ${mpi_includes})
endif()
dcp_header_test(initialisers ${CMAKE_CURRENT_SOURCE_DIR}/headers/initialisers.c)
add_test(NAME headers.initialisers COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/headers/check_initialisers.sh
    ${CMAKE_CURRENT_SOURCE_DIR}/headers/initialisers.c ${public_headers} ${mpi_header})

add_test(NAME headers.layers COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/headers/check_layers.sh ${PROJECT_SOURCE_DIR})
# Sanitizers and coverage export symbols of their own.
if(NOT DCP_SANITIZE AND NOT DCP_COVERAGE)
    add_test(NAME headers.symbols
        COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/headers/check_symbols.sh ${CMAKE_C_COMPILER} $<TARGET_FILE:dcp> ${public_headers})
    if(TARGET dcp_mpi)
        add_test(NAME headers.symbols_mpi
            COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/headers/check_symbols.sh ${CMAKE_C_COMPILER} $<TARGET_FILE:dcp_mpi> ${mpi_header})
    endif()
endif()
