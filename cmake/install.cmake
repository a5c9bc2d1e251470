# What "cmake --install" puts where: libraries, headers, pkg-config file, CMake package, the manual page and the
# completions of dcptool, which cli/ installs itself.
include(CMakePackageConfigHelpers)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/libdcp)
install(TARGETS dcp dcp_static EXPORT libdcpTargets)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/dcp DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h"
    PATTERN "mpi.h" EXCLUDE)
install(EXPORT libdcpTargets NAMESPACE libdcp:: DESTINATION ${package_dir})

# Libraries that a program with libdcp.a needs too, once for pkg-config and once for CMake.
get_property(libs GLOBAL PROPERTY DCP_LIBS)
list(REMOVE_DUPLICATES libs)
set(DCP_PRIVATE_LIBS)
set(DCP_CONFIG_PKG_CHECKS)
foreach(lib IN LISTS libs)
    if(lib MATCHES "^PkgConfig::(.*)$")
        list(APPEND DCP_PRIVATE_LIBS ${${CMAKE_MATCH_1}_LDFLAGS})
        string(APPEND DCP_CONFIG_PKG_CHECKS
            "    pkg_check_modules(${CMAKE_MATCH_1} QUIET IMPORTED_TARGET ${${CMAKE_MATCH_1}_MODULE_NAME})\n")
    elseif(lib STREQUAL "ZLIB::ZLIB")
        list(APPEND DCP_PRIVATE_LIBS -lz)
    elseif(lib STREQUAL "Threads::Threads")
        list(APPEND DCP_PRIVATE_LIBS -pthread)
    elseif(lib STREQUAL "dl")
        list(APPEND DCP_PRIVATE_LIBS -ldl)
    elseif(lib STREQUAL "m")
        list(APPEND DCP_PRIVATE_LIBS -lm)
    else()
        message(FATAL_ERROR "cmake/install.cmake does not know how ${lib} is found by users of libdcp.a")
    endif()
endforeach()
# Where the linker looks anyway.
list(TRANSFORM CMAKE_C_IMPLICIT_LINK_DIRECTORIES PREPEND -L OUTPUT_VARIABLE implicit)
list(REMOVE_ITEM DCP_PRIVATE_LIBS ${implicit})
list(JOIN DCP_PRIVATE_LIBS " " DCP_PRIVATE_LIBS)

configure_file(${CMAKE_CURRENT_LIST_DIR}/libdcp.pc.in ${PROJECT_BINARY_DIR}/libdcp.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/libdcp.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)

configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/libdcpConfig.cmake.in ${PROJECT_BINARY_DIR}/libdcpConfig.cmake
    INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/libdcpConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/libdcpConfig.cmake ${PROJECT_BINARY_DIR}/libdcpConfigVersion.cmake
    DESTINATION ${package_dir})

# A component of its own: who does not ask for it needs no MPI.
if(TARGET dcp_mpi)
    install(TARGETS dcp_mpi EXPORT libdcpMpiTargets)
    install(FILES ${PROJECT_SOURCE_DIR}/include/dcp/mpi.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/dcp)
    install(EXPORT libdcpMpiTargets NAMESPACE libdcp:: DESTINATION ${package_dir})
    configure_file(${CMAKE_CURRENT_LIST_DIR}/libdcp_mpi.pc.in ${PROJECT_BINARY_DIR}/libdcp_mpi.pc @ONLY)
    install(FILES ${PROJECT_BINARY_DIR}/libdcp_mpi.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
endif()

if(TARGET dcptool)
    file(RELATIVE_PATH from_bin /${CMAKE_INSTALL_BINDIR} /${CMAKE_INSTALL_LIBDIR})
    set_target_properties(dcptool PROPERTIES INSTALL_RPATH "$ORIGIN/${from_bin}")
    install(FILES ${PROJECT_SOURCE_DIR}/docs/man/dcptool.1 DESTINATION ${CMAKE_INSTALL_MANDIR}/man1)
    install(FILES ${PROJECT_SOURCE_DIR}/cli/completion/dcptool.bash
        DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions RENAME dcptool)
    install(FILES ${PROJECT_SOURCE_DIR}/cli/completion/_dcptool DESTINATION ${CMAKE_INSTALL_DATADIR}/zsh/site-functions)
    install(FILES ${PROJECT_SOURCE_DIR}/cli/completion/dcptool.fish
        DESTINATION ${CMAKE_INSTALL_DATADIR}/fish/vendor_completions.d)
endif()
