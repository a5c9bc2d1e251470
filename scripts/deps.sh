#!/usr/bin/env bash
# Installs what is missing to build (and test, and fuzz) libdcp on Debian and Ubuntu. Does nothing when all is there.
#
#     scripts/deps.sh [build] [test] [fuzz] [interop] [python]       (default: build)
#
# Uses apt-get as root or through sudo. On other systems it names what is needed and leaves it to the caller.
set -euo pipefail

build_packages=(gcc make pkg-config libisal-dev libxxhash-dev libzstd-dev zlib1g-dev libjansson-dev libssl-dev
    libutf8proc-dev libsmartcols-dev libcmocka-dev)
test_packages=(g++ valgrind libopenmpi-dev openmpi-bin libmpich-dev mpich)
# The second of a pair will do where a release does not have the first.
clang_packages=(clang-14:clang clang-format-14:clang-format clang-tidy-14:clang-tidy)
interop_packages=(python3 python3-venv)
python_packages=(python3 python3-dev python3-venv python3-pip)
fuzz_packages=(clang-14:clang libclang-rt-14-dev:libclang-rt-dev)

has_package() {
    [ "$(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null)" = installed ]
}

has_cmake() {
    local version
    version=$(cmake --version 2>/dev/null | sed -n 's/^cmake version \([0-9.]*\).*/\1/p') && [ -n "$version" ] &&
        [ "$(printf '%s\n' 3.25 "$version" | sort -V | head -n 1)" = 3.25 ]
}

# Any cmake that is new enough will do, from wherever it comes.
wanted_packages() {
    local group
    has_cmake || echo cmake
    for group in "$@"; do
        case $group in
            build) printf '%s\n' "${build_packages[@]}" ;;
            test) printf '%s\n' "${test_packages[@]}" "${clang_packages[@]}" ;;
            fuzz) printf '%s\n' "${fuzz_packages[@]}" ;;
            interop) printf '%s\n' "${interop_packages[@]}" ;;
            python) printf '%s\n' "${python_packages[@]}" ;;
            *) echo "deps.sh: unknown group '$group' (build, test, fuzz, interop, python)" >&2; return 2 ;;
        esac
    done | sort -u
}

missing_packages() {
    local entry
    for entry in $1; do
        has_package "${entry%%:*}" || has_package "${entry##*:}" || echo "$entry"
    done
}

as_root() {
    if [ "$(id -u)" -eq 0 ]; then
        env DEBIAN_FRONTEND=noninteractive "$@"
    elif command -v sudo >/dev/null; then
        sudo env DEBIAN_FRONTEND=noninteractive "$@"
    else
        echo "deps.sh: neither root nor sudo: please run '$*' as root" >&2
        return 1
    fi
}

# The names that this release knows, one for each entry of the list.
known_names() {
    local entry
    for entry in $1; do
        if [ -n "$(apt-cache madison "${entry%%:*}" 2>/dev/null)" ]; then
            echo "${entry%%:*}"
        else
            echo "${entry##*:}"
        fi
    done
}

install() {
    local names
    echo "deps.sh: missing:" ${1//:/ or }
    echo "deps.sh: apt-get update"
    as_root apt-get update -qq
    names=$(known_names "$1")
    echo "deps.sh: apt-get install" $names
    as_root apt-get install -y -qq --no-install-recommends $names
}

main() {
    [ $# -gt 0 ] || set -- build
    local wanted missing
    wanted=$(wanted_packages "$@")
    if command -v dpkg-query >/dev/null && command -v apt-get >/dev/null; then
        missing=$(missing_packages "$wanted")
        [ -z "$missing" ] || install "$missing"
    else
        echo "deps.sh: no apt-get here. Needed is what these Debian packages hold:" ${wanted//:/ or } >&2
        echo "deps.sh: going on as if it were installed" >&2
    fi
    has_cmake || { echo "deps.sh: cmake 3.25 or newer is needed, for instance from 'pip install cmake'" >&2; return 1; }
}

main "$@"
