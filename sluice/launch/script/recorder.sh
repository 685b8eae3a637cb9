# Every bash below a recorded script sources this file (BASH_ENV). Before each simple command the trap
# decides: a program that only prints runs, any other is recorded with its arguments, and no output goes
# to a file. Of a script's own programs PATH has only those that print, whatever it sets PATH to.

set -o functrace -o noclobber
ulimit -f 65536
enable -n kill
PATH=$__SLUICE_BIN

command_not_found_handle() { "$__SLUICE_BIN/record" "$@"; }

# The script's own trap of DEBUG would replace ours.
trap() {
  if [[ " $* " != *" DEBUG "* ]]; then builtin trap "$@"; fi
}

# Returns 0: run the command as it is; 1: run $__sluice_command in its place.
__sluice_plan() {
  # Only now, because bash would look for a debugger at its start. A trap that fails skips the command.
  shopt -s extdebug
  PATH=$__SLUICE_BIN
  __sluice_command=
  local rest=$BASH_COMMAND lead='' word='' has_path=''
  if [[ ${FUNCNAME[1]:-} == @(command_not_found_handle|trap) ]]; then return 0; fi
  case $rest in '[['* | '(('* | 'for '* | 'case '* | 'select '*) return 0 ;; esac
  while [[ $rest =~ ^[A-Za-z_][A-Za-z0-9_]*(\[[^]]*\])?\+?= ]]; do
    __sluice_find_end "$rest"
    if ((__sluice_end == ${#rest})); then return 0; fi
    if [[ $rest == PATH=* ]]; then has_path=1; else lead+="${rest:0:__sluice_end} "; fi
    rest=${rest:__sluice_end+1}
  done
  while [[ $rest =~ ^(exec|command|builtin)[[:space:]]+([^-0-9\<\>\&].*)$ ]]; do
    rest=${BASH_REMATCH[2]}
  done
  if [[ $rest =~ ^([^[:space:]]+) ]]; then word=${BASH_REMATCH[1]}; fi
  if [[ $word =~ ^[0-9\&]*[\<\>] ]]; then
    word=''
  elif [[ $word == *['$"'\']* && $word != *'$('* && $word != *'`'* ]]; then
    eval "word=$word" 2>/dev/null
    word=${word%% *}
  fi
  if [[ $word == *.sh && ( $word == */* || -f $word ) ]]; then
    __sluice_command="$lead\"\$__SLUICE_BIN/bash\" $rest"
  elif [[ $word == */* && $word != "$__SLUICE_BIN"/* ]]; then
    __sluice_command="$lead\"\$__SLUICE_BIN/record\" $rest"
  elif [[ -n $has_path ]]; then
    __sluice_command=$lead$rest
  fi
  case ${word##*/} in python* | torchrun | ray | accelerate | deepspeed | srun | nohup | env) __sluice_note_unset ;; esac
  local command=${__sluice_command:-$lead$rest} as_given=$__sluice_command
  # What these run must stay under the trap; noclobber protects files from them.
  if [[ $word == @(eval|source|.) ]] || declare -F "$word" &>/dev/null; then return 0; fi
  if [[ $command == *'>'* ]]; then
    __sluice_strip "$command"
    if [[ $__sluice_command == "$command" ]]; then __sluice_command=$as_given; fi
  fi
  if [[ -z $__sluice_command ]]; then return 0; fi
  # No trap watches what the trap itself runs.
  if [[ $__sluice_command =~ (\$\(|\`|\<\()(.*[\|\;\&\(])?[[:space:]]*[^[:space:]\"\'=]*/[A-Za-z] ]]; then
    printf '%s\0' 1 "$BASH_COMMAND" >>"$__SLUICE_RECORD"
    __sluice_command=:
  fi
  return 1
}

# Sets $__sluice_end to the position of the first blank outside of quotes and parentheses.
__sluice_find_end() {
  local text=$1 quote='' character depth=0
  for ((__sluice_end = 0; __sluice_end < ${#text}; __sluice_end++)); do
    character=${text:__sluice_end:1}
    if [[ -n $quote ]]; then
      if [[ $character == "$quote" ]]; then quote=''; fi
    elif [[ $character == \\ ]]; then
      __sluice_end=$((__sluice_end + 1))
    elif [[ $character == [\'\"] ]]; then
      quote=$character
    elif [[ $character == '(' ]]; then
      depth=$((depth + 1))
    elif [[ $character == ')' ]]; then
      depth=$((depth - 1))
    elif [[ $depth -eq 0 && $character == [[:space:]] ]]; then
      return
    fi
  done
}

# Sets $__sluice_command to a command without its redirections of output to files.
__sluice_strip() {
  local text=$1 quote='' character i=0 depth=0 is_target=''
  local kept='^>[>|]?[[:space:]]*(&[[:space:]]*[0-9-]|/dev/)'
  __sluice_command=
  while ((i < ${#text})); do
    character=${text:i:1}
    if [[ $quote == "'" ]]; then
      if [[ $character == "'" ]]; then quote=''; fi
    elif [[ $character == \\ ]]; then
      if [[ -z $is_target ]]; then __sluice_command+=${text:i:2}; fi
      i=$((i + 2))
      continue
    elif [[ $character == '"' ]]; then
      if [[ $quote == '"' ]]; then quote=''; else quote='"'; fi
    elif [[ $character == "'" && -z $quote ]]; then
      quote="'"
    elif [[ $character == '(' ]]; then
      depth=$((depth + 1))
    elif [[ $character == ')' ]]; then
      depth=$((depth - 1))
    elif [[ -z $quote && $depth -eq 0 && $character == '>' && ! ${text:i} =~ $kept ]]; then
      if [[ $__sluice_command =~ [[:space:]][0-9\&]$ ]]; then __sluice_command=${__sluice_command%?}; fi
      i=$((i + 1))
      while [[ ${text:i:1} == ['>|&'[:space:]] ]]; do
        # ">(" after blanks is a target: a process substitution.
        if [[ ${text:i:2} == '>(' ]]; then i=$((i + 1)); break; fi
        i=$((i + 1))
      done
      is_target=1
      continue
    elif [[ -z $quote && $depth -eq 0 && $character == [[:space:]] ]]; then
      is_target=''
    elif [[ -z $quote && $depth -eq 0 && $character == '>' ]]; then
      # Kept as a whole: its target is no file.
      __sluice_command+=${BASH_REMATCH[0]}
      i=$((i + ${#BASH_REMATCH[0]}))
      continue
    fi
    if [[ -z $is_target ]]; then __sluice_command+=$character; fi
    i=$((i + 1))
  done
}

__sluice_note_unset() {
  local IFS=' ' name
  for name in $__SLUICE_NAMES; do
    if ! declare -p "$name" &>/dev/null; then printf '%s\n' "$name" >>"$__SLUICE_UNSET"; fi
  done
}

builtin trap '__sluice_plan || { eval "$__sluice_command" || :; ! :; }' DEBUG
