# Every bash below a recorded script sources this file (BASH_ENV). PATH has only programs that print and
# recorders, whatever the script sets it to, so all others are not found and recorded. The trap records
# programs that are called by a path.

set -o functrace
ulimit -f 65536 -v 16777216 2>/dev/null
enable -n kill
PATH=$__SLUICE_BIN

command_not_found_handle() { __sluice_called "$@"; }

# Takes the place of a program; runs it if it only prints or is a shell.
__sluice_called() {
  local __sluice_name=${1##*/}
  local __sluice_file=$__SLUICE_BIN/$__sluice_name
  case $__sluice_name in
  *.sh | *.bash)
    "$__SLUICE_BIN/bash" "$@"
    return
    ;;
  python* | torchrun | ray | accelerate | deepspeed | srun | nohup | env) __sluice_note_unset ;;
  esac
  if [[ -e $__sluice_file && ! $__sluice_file -ef $__SLUICE_BIN/recorder ]]; then
    "$__sluice_file" "${@:2}"
  else
    "$__SLUICE_BIN/record" "$@"
  fi
}

__sluice_note_unset() {
  local IFS=' ' __sluice_name
  for __sluice_name in $__SLUICE_NAMES; do
    if ! declare -p "$__sluice_name" &>/dev/null; then "$__SLUICE_BIN/record" unset "$__sluice_name"; fi
  done
}

# Before each command, with the arguments of the function or script it stands in: a function with the
# name of a program's path takes the program's place.
__sluice_before() {
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
  unset -f exec
  if [[ $__sluice_rest == exec\ [!-\<\>\&\{0-9]* ]]; then exec() { "$@"; exit; }; fi
  __sluice_rest=${__sluice_rest%%[[:space:]]*}
  if [[ $__sluice_rest != *[/\$]* || $__sluice_rest == *[\(\`\<\>]* ]]; then return; fi
  eval "set -- $__sluice_rest"
  if [[ ${1-} == */* && $1 != "$__SLUICE_BIN"/* && $1 != *[!A-Za-z0-9_./+@%-]* ]]; then
    eval "function $1 { __sluice_called $1 \"\$@\"; }"
  fi
}

for __sluice_name in $__SLUICE_RECORDED; do
  eval "$__sluice_name() { __sluice_called $__sluice_name \"\$@\"; }"
done
unset __sluice_name
trap '__sluice_before "$@"' DEBUG
