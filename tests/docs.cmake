# What the documentation shows is what the tool does.
if(TARGET dcptool AND NOT DCP_SANITIZE)
    foreach(what readme options)
        add_test(NAME docs.${what}
            COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/docs/check_${what}.sh ${PROJECT_SOURCE_DIR} $<TARGET_FILE:dcptool>)
    endforeach()
endif()
if(TARGET dcp_python AND NOT DCP_SANITIZE)
    add_test(NAME docs.python
        COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/docs/check_python.sh ${PROJECT_SOURCE_DIR} ${PROJECT_BINARY_DIR})
    set_tests_properties(docs.python PROPERTIES SKIP_RETURN_CODE 77)
endif()
add_test(NAME docs.requirements COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/docs/check_requirements.sh ${PROJECT_SOURCE_DIR})
