# What a user of the headers relies on, and the arrows between our layers.
set(strict -Wall -Wextra -Wpedantic -Werror -fsyntax-only -I${PROJECT_SOURCE_DIR}/include)
find_program(DCP_CXX NAMES c++ g++ clang++ clang++-14 DOC "C++ compiler for the tests of the headers")
mark_as_advanced(DCP_CXX)

# A public header, or a source that uses them, passes the compilers alone.
function(dcp_header_test name file)
    add_test(NAME headers.${name}.c11 COMMAND ${CMAKE_C_COMPILER} -x c -std=c11 ${strict} ${file})
    if(DCP_CXX)
        add_test(NAME headers.${name}.cxx17 COMMAND ${DCP_CXX} -x c++ -std=c++17 ${strict} ${file})
    else()
        add_test(NAME headers.${name}.cxx17 COMMAND sh -c "echo 'no C++ compiler'; exit 77")
        set_tests_properties(headers.${name}.cxx17 PROPERTIES SKIP_RETURN_CODE 77)
    endif()
endfunction()

file(GLOB public_headers CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/include/dcp/*.h)
foreach(header IN LISTS public_headers)
    get_filename_component(name ${header} NAME_WE)
    dcp_header_test(${name} ${header})
endforeach()
dcp_header_test(initialisers ${CMAKE_CURRENT_SOURCE_DIR}/headers/initialisers.c)

add_test(NAME headers.layers COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/headers/check_layers.sh ${PROJECT_SOURCE_DIR})
# Sanitizers and coverage export symbols of their own.
if(NOT DCP_SANITIZE AND NOT DCP_COVERAGE)
    add_test(NAME headers.symbols
        COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/headers/check_symbols.sh ${PROJECT_SOURCE_DIR}/include $<TARGET_FILE:dcp> ${CMAKE_C_COMPILER})
endif()
