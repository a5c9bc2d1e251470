# Completion of dcptool for bash.

# Options of a command, those that every command takes included.
_dcptool_options() {
    local save="--force --files= --file-per-item --align --transform= --target= --no-sync"
    local common="--json --quiet --allow-outside --shard-gaps --memory= --threads= --help --usage --version"
    case $1 in
    ls) echo "$common --tree" ;;
    cat) echo "$common --format= --as-bits --rank=" ;;
    verify) echo "$common --quick" ;;
    copy | merge) echo "$common $save" ;;
    convert)
        echo "$common --to= --force --resume --include= --exclude= --rename= --prefix= --cast= --dequantize= --allow-overflow --split= --alias=" \
            "--objects= --max-file-size= --mapping= --ranks= --files= --transform= --no-sync --no-check"
        ;;
    diff) echo "$common --atol= --rtol=" ;;
    reshard) echo "$common $save --ranks= --mesh= --place=" ;;
    demo) echo "$common --ranks= --reload-ranks= --size= --force" ;;
    info | hash | latest) echo "$common" ;;
    *) echo "--help --usage --version" ;;
    esac
}

# Names of the items of a checkpoint, one a line.
_dcptool_items() {
    dcptool ls --json --quiet "$1" 2>/dev/null | grep -oE '"fqn": ?"[^"\\]*"' | sed 's/^"fqn": *"//; s/"$//'
}

_dcptool() {
    local cur=${COMP_WORDS[COMP_CWORD]} command='' args=() i
    COMPREPLY=()
    for ((i = 1; i < COMP_CWORD; i++)); do
        case ${COMP_WORDS[i]} in
        -* | =) ;;
        *) if [ -z "$command" ]; then command=${COMP_WORDS[i]}; else args+=("${COMP_WORDS[i]}"); fi ;;
        esac
    done

    if [[ $cur == -* ]]; then
        mapfile -t COMPREPLY < <(compgen -W "$(_dcptool_options "$command")" -- "$cur")
        [[ ${COMPREPLY[0]-} != *= ]] || compopt -o nospace 2>/dev/null
    elif [ -z "$command" ]; then
        mapfile -t COMPREPLY < <(compgen -W "ls info cat hash verify latest copy merge reshard convert diff demo" -- "$cur")
    elif [ "$command" = cat ] && [ ${#args[@]} -eq 1 ]; then
        local IFS=$'\n'
        mapfile -t COMPREPLY < <(compgen -W "$(_dcptool_items "${args[0]}")" -- "$cur")
    else
        compopt -o filenames 2>/dev/null
        mapfile -t COMPREPLY < <(compgen -f -- "$cur")
    fi
}

complete -F _dcptool dcptool
