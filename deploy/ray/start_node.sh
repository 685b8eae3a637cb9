#!/usr/bin/env bash
# Makes this machine a node of a Ray cluster. The same command on every machine, also under srun, mpirun
# or pdsh:
#
#   NODES=4 DEVICE=NPU DEVICES_PER_NODE=8 deploy/ray/start_node.sh HEAD -- sluice up run.yaml --on ray
#
# HEAD is the name or address of one of the machines. It becomes the head, waits until all nodes have
# joined with all devices, runs the command, takes the cluster down and exits with the command's code.
# The others stay until the head is gone; one that cannot join, or is lost while the head lives, ends with
# Ray's code. Without a command the head stays as well, until SIGTERM. SIGTERM and SIGINT are handed on to
# what runs at the moment.
#
# Variables:
#   NODES             machines of the cluster (1)
#   DEVICE            NPU, GPU or none: what each machine brings (none)
#   DEVICES_PER_NODE  how many (0)
#   RESOURCES         further resources of this machine, JSON as `ray start --resources` takes it ({})
#   PORT              of the head (6379)
#   INTERFACE         network that nodes talk over; by default the one that leads to HEAD
#   JOIN_TIMEOUT_S    seconds until all have joined (600)
#   RAY_OPTIONS       further words for `ray start`
#   PYTHON            an interpreter that has sluice[ray] (python)
set -euo pipefail

usage() {
    sed -n '2,23s/^# \{0,1\}//p' "$0" >&2
    exit 2
}

[ $# -ge 1 ] || usage
case $1 in -*) usage ;; esac
head_name=$1
shift
[ $# -eq 0 ] || { [ "$1" = "--" ] && shift; } || usage

child='' heard='' missed='' stopped=''

hand_on() { # SIGNAL CODE
    heard=yes stopped=$2
    [ -n "$child" ] || missed=yes
    [ -z "$child" ] || kill -"$1" "$child" 2>/dev/null || true
}
trap 'hand_on TERM 143' TERM
trap 'hand_on INT 130' INT

# Runs a command and returns its code; in the background, since bash heeds no signal before a command in
# the foreground has ended. Job control lets it have SIGINT.
follow() {
    local code=0 again
    heard='' missed=''
    [ -z "$stopped" ] || exit "$stopped"
    set -m
    "$@" &
    child=$!
    set +m
    [ -z "$missed" ] || kill -TERM "$child" 2>/dev/null || true
    wait "$child" || code=$?
    # A signal ends the wait and not the command. 127: it had ended, and its code is known.
    while [ -n "$heard" ]; do
        heard='' again=0
        wait "$child" 2>/dev/null || again=$?
        [ "$again" = 127 ] || code=$again
    done
    child=''
    return "$code"
}

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-python}
pause_s=2 port=${PORT:-6379} nodes=${NODES:-1} join_timeout_s=${JOIN_TIMEOUT_S:-600}
device=${DEVICE:-none} count=${DEVICES_PER_NODE:-0} resources=${RESOURCES:-{\}}

# Address of the head, this machine's address on the network that leads there, and its interface.
read -r head_address address interface < <("$python" "$here/node_network.py" "$head_name" "${INTERFACE:-}" "$nodes")

# Collectives have to take the network on which nodes know each other; set by hand, they stay.
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$interface}
export HCCL_SOCKET_IFNAME=${HCCL_SOCKET_IFNAME:-$interface}
export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-$interface}
export RAY_USAGE_STATS_ENABLED=${RAY_USAGE_STATS_ENABLED:-0}

options=(--node-ip-address="$address")
case $device in
    GPU) options+=(--num-gpus="$count") ;;
    NPU) resources=$("$python" -c 'import json, sys
print(json.dumps({**json.loads(sys.argv[1]), "NPU": int(sys.argv[2])}))' "$resources" "$count") ;;
    none) ;;
    *) echo "DEVICE=$device: give NPU, GPU or none" >&2; exit 2 ;;
esac
options+=(--resources="$resources")
read -r -a further <<<"${RAY_OPTIONS:-}"
options+=(${further[@]+"${further[@]}"})

answers() { (exec 3<>"/dev/tcp/$head_address/$port") 2>/dev/null; }

if [ "$address" != "$head_address" ]; then
    echo "node $address ($interface) joins $head_address:$port" >&2
    until_s=$((SECONDS + join_timeout_s))
    # The head may be started later.
    until answers; do
        [ -z "$stopped" ] || exit "$stopped"
        [ "$SECONDS" -lt "$until_s" ] || { echo "$head_address:$port: no head answers" >&2; exit 1; }
        sleep "$pause_s"
    done
    code=0
    follow ray start --address="$head_address:$port" "${options[@]}" --block || code=$?
    [ -z "$stopped" ] || exit "$stopped"
    # It ends with an error when the head goes away, which is how the others learn that all is over. A head
    # that goes on answering has lost this node.
    for _ in 1 2 3 4 5; do
        [ "$code" -ne 0 ] && answers || { echo "node $address has left the cluster" >&2; exit 0; }
        sleep "$pause_s"
    done
    echo "node $address: ray start ended with code $code, and the head at $head_address:$port lives" >&2
    exit "$code"
fi

echo "node $address ($interface) is the head, port $port" >&2
code=0
follow ray start --head --port="$port" "${options[@]}" || code=$?
# A cluster that was there before is not this one to end.
[ "$code" -eq 0 ] || [ -n "$stopped" ] || exit "$code"
trap 'ray stop --grace-period 30 >&2 || true' EXIT
expected=(--nodes "$nodes")
[ "$device" = none ] || expected+=(--resource "$device=$((nodes * count))")
follow "$python" "$here/wait_for_cluster.py" --address "$address:$port" --timeout "$join_timeout_s" "${expected[@]}"
if [ $# -gt 0 ]; then
    export RAY_ADDRESS="$address:$port"
    follow "$@"
    exit 0
fi
follow sleep infinity
