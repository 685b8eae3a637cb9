# Begins the run once for each Job of the trainer: prepare.sh FOLDER UID COMMAND...
# A pod that replaces another one of the same Job finds the mark and leaves the run as it is, also one
# that has ended, which `sluice prepare` would begin again.
set -eu
folder=$1
mark=$folder/prepared/$2
shift 2
if [ -e "$mark" ]; then
  echo "$mark: prepared before"
  exit 0
fi
# As the services' user: the ledger's own volume is mounted at the second one as soon as the run begins.
mkdir -p "$folder/prepared" "$folder/reward"
"$@"
: > "$mark"
