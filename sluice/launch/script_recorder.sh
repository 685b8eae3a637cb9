# Every bash below a recorded script sources this file (BASH_ENV). PATH has only programs that print and
# recorders, whatever the script sets it to, so all others are not found, and recorded. The trap records
# programs that are called by a path.

set -o functrace
ulimit -f 65536 -v 16777216 2>/dev/null
enable -n kill

command_not_found_handle() { __sluice_call "$@"; }

# Takes the place of a program, named or by its path: runs it if it prints or is a shell, else records it.
__sluice_call() {
  local __sluice_name=${1##*/} __sluice_word __sluice_options=()
  case $__sluice_name in
  *.sh | *.bash)
    set -- bash "$@"
    __sluice_name=bash
    ;;
  bash | sh)
    # An interactive shell would not read this file, and a login shell would run the user's own.
    shift
    while [[ ${1-} == -?* ]]; do
      __sluice_word=${1//[il]/}
      if [[ $1 == --* ]]; then __sluice_word=${1#--login}; fi
      if [[ $__sluice_word != ?(-) ]]; then __sluice_options+=("$__sluice_word"); fi
      shift
    done
    set -- "$__sluice_name" "${__sluice_options[@]}" "$@"
    ;;
  nvidia-smi)
    # Only lists and queries run: a reset of a device must not happen.
    for __sluice_word in "${@:2}"; do
      if [[ $__sluice_word != @(-L|-i*|--list-gpus|--query-*|--format*|[0-9]*) ]]; then __sluice_name=; fi
    done
    ;;
  esac
  if [[ -f $__SLUICE_BIN/$__sluice_name && ! $__SLUICE_BIN/$__sluice_name -ef $__SLUICE_BIN/recorder ]]; then
    "$__SLUICE_BIN/$__sluice_name" "${@:2}"
  else
    for __sluice_word in $__SLUICE_NAMES; do
      if ! declare -p "$__sluice_word" &>/dev/null; then
        printf '%s\0' 2 unset "$__sluice_word" >>"$__SLUICE_CALLS"
      fi
    done
    __sluice_export
    printf '%s\0' "$#" "$@" >>"$__SLUICE_CALLS"
    # verl's scripts ask so whether the devices are NPUs.
    if [[ $__sluice_name == python* && ${2-} == -c && ${3-} == "import torch_npu"* ]]; then return "$__SLUICE_NO_NPU"; fi
  fi
}

# Records the environment, without the lines of set -x.
__sluice_export() {
  local -
  set +x
  local __sluice_word __sluice_exported=() IFS=$'\n'
  for __sluice_word in $(compgen -e); do __sluice_exported+=("$__sluice_word=${!__sluice_word-}"); done
  printf '%s\0' "$((${#__sluice_exported[@]} + 1))" export "${__sluice_exported[@]}" >>"$__SLUICE_CALLS"
}

# Before each command, with the arguments of the function or script it stands in: a function with the
# name of a program's path takes the program's place.
__sluice_before() {
  local - # without the lines of set -x
  set +x
  local __sluice_rest=$BASH_COMMAND
  PATH=$__SLUICE_BIN
  while [[ $__sluice_rest == [A-Za-z_]*([A-Za-z0-9_])?(+)=* ]]; do
    __sluice_rest=${__sluice_rest#*=}
    case $__sluice_rest in
    \(*) return ;;
    \"*) __sluice_rest=${__sluice_rest#?*\"} ;;
    \'*) __sluice_rest=${__sluice_rest#?*\'} ;;
    \$\(*) __sluice_rest=${__sluice_rest#*\)} ;;
    esac
    if [[ $__sluice_rest != *[[:space:]]* ]]; then return; fi
    __sluice_rest=${__sluice_rest#*[[:space:]]}
  done
  # A setting that no launch has: bash looks for a file if its value has a /, and calls no handler.
  if [[ $__sluice_rest == ?(+)?(+)[A-Za-z_]*([A-Za-z0-9_-]).+([A-Za-z0-9_.-])=* ]]; then
    if eval "set -- $__sluice_rest" && [[ $1 == */* ]]; then printf '%s\0' "$#" "$@" >>"$__SLUICE_CALLS"; fi
    return 0
  fi
  unset -f exec
  if [[ $__sluice_rest == exec\ [!-\<\>\&\{0-9]* ]]; then exec() { "$@"; exit; }; fi
  __sluice_rest=${__sluice_rest%%[[:space:]]*}
  if [[ $__sluice_rest != *[/\$]* || $__sluice_rest == *[\(\)\`\<\>\;\&\|]* ]]; then return; fi
  if ! eval "set -- $__sluice_rest"; then return 0; fi
  if [[ ${1-} == */* && $1 != "$__SLUICE_BIN"/* && $1 != *[!A-Za-z0-9_./+@%-]* ]]; then
    eval "function $1 { __sluice_call $1 \"\$@\"; }"
  fi
}

PATH=$__SLUICE_BIN
for __sluice_name in $__SLUICE_RECORDED; do
  eval "$__sluice_name() { __sluice_call $__sluice_name \"\$@\"; }"
done
trap '__sluice_last=$_; __sluice_before "$@"; : "$__sluice_last"' DEBUG
