#!/usr/bin/env bash
# check_options.sh SOURCE_DIR DCPTOOL: the manual page and the completions know exactly the commands and long options that
# dcptool has.
set -euo pipefail
source_dir=$1 dcptool=$2
cd "$source_dir"
failed=0

same() {
    local difference
    difference=$(diff <(echo "$2") <(echo "$3")) || { echo "$1:"; echo "$difference"; failed=1; }
}

# Long options in a help text, without their arguments.
long_options() {
    grep -oE -- '(^|[ ,])--[a-z][a-z-]+' | grep -oE -- '--[a-z-]+' | sort -u
}

source cli/completion/dcptool.bash
commands=$("$dcptool" --help | sed -n '/^Commands:/,/^$/s/^  \([a-z]*\) .*/\1/p' | sort)
[ -n "$commands" ]
everything=$("$dcptool" --help | long_options)
for command in $commands; do
    # The list of options only: examples below it may name others.
    options=$("$dcptool" "$command" --help | grep -E '^ +-' | long_options)
    same "bash, $command" "$options" "$(_dcptool_options "$command" | tr ' ' '\n' | sed 's/=$//' | sort -u)"
    everything+=$'\n'$options
done
everything=$(sort -u <<<"$everything")

same "manual" "$everything" "$(grep -E '^\.It Fl' docs/man/dcptool.1 | grep -oE -- '-[a-z][a-z-]+' | sed 's/^/-/' | sort -u)"
same "zsh" "$everything" "$(grep -v '^#' cli/completion/_dcptool | grep -oE -- "['{,)*]--[a-z][a-z-]+" | sed 's/^.//' | sort -u)"
same "fish" "$everything" "$(grep -oE -- '^complete .* -l [a-z-]+' cli/completion/dcptool.fish | sed 's/.* -l /--/' | sort -u)"
same "manual, commands" "$commands" "$(sed -n 's/^\.It Cm \([a-z]*\).*/\1/p' docs/man/dcptool.1 | sort)"
exit $failed
