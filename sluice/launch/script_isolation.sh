# The first process in the namespaces of a recorded script. It builds a root folder in which what is
# written lands in memory, or fails, and starts the script in it; when it ends, the kernel ends all others.
# Arguments: an empty folder, the file for calls, and the command.

set -eu
memory=$1 calls=$2
shift 2
PATH=$PATH:/usr/sbin:/sbin
new=$memory/root
num_layers=0

# What is written to a folder stays in memory, or it is read-only where the kernel has no overlay for it.
cover() {
  local layer=$memory/layers/$((++num_layers))
  if [[ ! -e $1 ]]; then return; fi
  # A name with a comma or a colon would be read as several, so the lower folder has none.
  (
    cd "$1"
    exec mount -t overlay -o "lowerdir=.,upperdir=$layer/upper,workdir=$layer/work" overlay "$new$1"
  ) 2>/dev/null || protect "$1"
}

protect() {
  mountpoint -q "$new$1" || mount --rbind "$1" "$new$1" 2>/dev/null || return 0
  mount -o remount,bind,ro "$new$1"
}

mount -t tmpfs -o size=256m,mode=0755 tmpfs "$memory"
mkdir "$new"
mount -t tmpfs -o size=1m,mode=0755 tmpfs "$new"
links=() points=()
for file in /*; do
  if [[ -L $file ]]; then
    links+=("$file")
  elif [[ -d $file ]]; then
    points+=("$file")
  fi
done
# One program for all, here and below: to start one takes longer than what it does.
mkdir -p "$new"/{dev/shm,proc,run,sys} "${points[@]/#/"$new"}"
if ((${#links[@]})); then cp -P "${links[@]}" "$new"; fi
mount -t proc -o ro,nosuid,nodev,noexec proc "$new/proc"
for file in /dev/{null,zero,full,random,urandom,nvidia*}; do
  if [[ -c $file ]]; then
    : >"$new$file"
    mount --bind "$file" "$new$file"
  fi
done
cp -P /dev/{fd,stdin,stdout,stderr} "$new/dev"
while read -r _ _ _ _ file _; do
  printf -v file %b "$file"
  points+=("$file")
done </proc/self/mountinfo
# A folder comes before what lies in it.
mapfile -d '' -t points < <(printf '%s\0' "${points[@]}" /dev/shm "$PWD" | LC_ALL=C sort -zu)
layers=()
for ((number = 1; number <= ${#points[@]}; number++)); do
  layers+=("$memory/layers/$number/"{upper,work})
done
mkdir -p "${layers[@]}"
for point in "${points[@]}"; do
  case $point in
  /dev/shm) cover "$point" ;;
  /sys | /sys/*) protect "$point" ;;
  / | /proc | /proc/* | /dev | /dev/* | /run | /run/* | "$memory" | "$memory"/*) ;;
  *) cover "$point" ;;
  esac
done
mount --bind "$calls" "$new$calls"
folder=$PWD
pivot_root "$new" "$new$memory"
umount -l "$memory"
cd "$folder"
printf 'ready\0' >>"$calls"

ulimit -u 1024 2>/dev/null || true
code=0
setpriv --no-new-privs --ambient-caps=-all --inh-caps=-all \
  --bounding-set=-all,+dac_override,+dac_read_search "$@" || code=$?
# What it left in the background may still start the training.
for _ in {1..20}; do
  processes=(/proc/[0-9]*)
  if ((${#processes[@]} == 1)); then break; fi
  sleep 0.1
done
exit "$code"
