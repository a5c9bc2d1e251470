#!/usr/bin/env bash
# install_and_use.sh HOW BUILD_DIR CHECKPOINT CC LIBDIR [MPIEXEC]: installs the build into a fresh prefix, builds consumer.c against it
# the way that HOW names (shared, static: by pkg-config; cmake: by find_package, both libraries; mpi: consumer_mpi.c both ways, CC
# being mpicc; files: nothing built), runs it.
set -euo pipefail
how=$1 build=$2 checkpoint=$3 cc=$4 libdir=$5 mpiexec=${6:-}
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
prefix=$work/prefix
unset DESTDIR

cmake --install "$build" --prefix "$prefix" >/dev/null
export PKG_CONFIG_PATH=$prefix/$libdir/pkgconfig
# The prefix is not the one that was configured: have pkg-config find it from where the file lies.
pkg_config() {
    pkg-config --define-prefix "$@"
}

run() {
    local out
    out=$(env LD_LIBRARY_PATH="$prefix/$libdir" "$@" "$checkpoint")
    echo "$out"
    [[ $out =~ ^libdcp\ $(pkg_config --modversion libdcp):\ [1-9][0-9]*\ items$ ]]
}

# The libraries that a program names itself, without the path.
needed() {
    readelf -d "$1" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p'
}

case $how in
shared)
    "$cc" -std=c11 "$here/consumer.c" -o "$work/consumer" $(pkg_config --cflags --libs libdcp)
    needed "$work/consumer" | grep -qE '^libdcp\.so\.[0-9]+$'
    run "$work/consumer"
    ;;
static)
    flags=$(pkg_config --static --cflags --libs libdcp)
    "$cc" -std=c11 "$here/consumer.c" -o "$work/consumer" ${flags/-ldcp/-l:libdcp.a}
    ! needed "$work/consumer" | grep -q libdcp
    run "$work/consumer"
    ;;
cmake)
    cmake -S "$here" -B "$work/build" -DCMAKE_PREFIX_PATH="$prefix" -DCMAKE_C_COMPILER="$cc" >/dev/null
    cmake --build "$work/build" >/dev/null
    ! needed "$work/build/consumer_dcp_static" | grep -q libdcp
    run "$work/build/consumer_dcp"
    run "$work/build/consumer_dcp_static"
    ;;
mpi)
    run_ranks() {
        local out
        out=$(env LD_LIBRARY_PATH="$prefix/$libdir" "$mpiexec" -n 2 "$1")
        echo "$out"
        [[ $out == "libdcp $(pkg_config --modversion libdcp_mpi): 2 ranks" ]]
    }
    "$cc" -std=c11 "$here/consumer_mpi.c" -o "$work/consumer" $(pkg_config --cflags --libs libdcp_mpi)
    needed "$work/consumer" | grep -qE '^libdcp_mpi\.so\.[0-9]+$'
    run_ranks "$work/consumer"
    cmake -S "$here" -B "$work/build" -DCMAKE_PREFIX_PATH="$prefix" -DMPI_C_COMPILER="$cc" -DWITH_MPI=ON >/dev/null
    cmake --build "$work/build" --target consumer_dcp_mpi >/dev/null
    run_ranks "$work/build/consumer_dcp_mpi"
    ;;
files)
    # Public headers and nothing else of ours, no trace of the build directory. mpi.h is there with its library only.
    without=()
    [ -e "$prefix/$libdir/libdcp_mpi.so" ] || without=(-I mpi.h)
    diff <(cd "$here/../../include/dcp" && ls "${without[@]}") <(cd "$prefix/include/dcp" && ls)
    for file in bin/dcptool share/man/man1/dcptool.1 share/bash-completion/completions/dcptool \
        "$libdir/libdcp.so" "$libdir/libdcp.a" "$libdir/pkgconfig/libdcp.pc" "$libdir/cmake/libdcp/libdcpConfig.cmake" \
        "$libdir/libdcp/dcp-writer"; do
        [ -e "$prefix/$file" ] || { echo "not installed: $file"; exit 1; }
    done
    ! grep -rlF -e "$build" "$prefix/$libdir/pkgconfig" "$prefix/$libdir/cmake"
    "$prefix/bin/dcptool" --version
    ;;
esac
