#!/usr/bin/env bash
# check_layers.sh SOURCE_DIR: no file includes a header of a layer above its own or beside it, cli/ and examples/ include public
# headers only, public headers include public ones only, and no two .c files of the tree share a name.
set -euo pipefail
cd "$1"

# A folder of src/, and the folders below it that it may use.
below=(
    "base:"
    "state:base"
    "format:state base"
    "plan:format state base"
    "storage:plan format state base"
    "device:plan format state base"
    "comm:plan format state base"
    "engine:comm device storage plan format state base"
)
# The same for the folders of the engine.
engine_below=(
    "read:"
    "save:read"
    "load:save read"
    "verify:save read"
    "stage:save read"
    "convert:save read"
)
failed=0
complain() {
    echo "$1"
    failed=1
}

# allowed_in FOLDER ROW...
allowed_in() {
    local row folder=$1
    shift
    for row in "$@"; do
        [ "${row%%:*}" != "$folder" ] || { echo "$folder ${row#*:}"; return; }
    done
}

checked=0
for dir in src/*/; do
    layer=$(basename "$dir")
    allowed=" dcp $(allowed_in "$layer" "${below[@]}") "
    [ "$allowed" != " dcp  " ] || complain "src/$layer is not a layer"
    while IFS=: read -r file line text; do
        used=$(sed -E 's/^[^"]*"([^"\/]*)\/.*/\1/' <<<"$text")
        checked=$((checked + 1))
        case $allowed in *" $used "*) ;; *) complain "$file:$line: $layer must not include $text" ;; esac
    done < <(grep -rnE '^ *# *include +"[^"]*/' "$dir" || true)
done
for dir in src/engine/*/; do
    part=$(basename "$dir")
    allowed=" $(allowed_in "$part" "${engine_below[@]}") "
    [ "$allowed" != "  " ] || complain "src/engine/$part has no place among the engine's folders"
    while IFS=: read -r file line text; do
        used=$(sed -E 's/^[^"]*"engine\/([^"\/]*)\/.*/\1/' <<<"$text")
        checked=$((checked + 1))
        case $allowed in *" $used "*) ;; *) complain "$file:$line: engine/$part must not include $text" ;; esac
    done < <(grep -rnE '^ *# *include +"engine/' "$dir" || true)
done
[ "$checked" -gt 0 ] || complain "nothing checked below src/"

while IFS=: read -r file line text; do
    complain "$file:$line: internal header: $text"
done < <(grep -rnE '^ *# *include +["<](base|state|format|plan|storage|device|comm|engine|\.\.)/' include cli examples python \
    --include='*.[ch]' 2>/dev/null || true)

twice=$(find src cli python -name '*.c' -printf '%f\n' | sort | uniq -d)
[ -z "$twice" ] || complain "names used twice: $twice"
exit $failed
