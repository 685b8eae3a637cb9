#!/usr/bin/env bash
# Makes this machine a node of a Ray cluster. The same command on every machine, also under srun, mpirun
# or pdsh:
#
#   NODES=4 DEVICE=NPU DEVICES_PER_NODE=8 deploy/ray/start_node.sh HEAD -- sluice up run.yaml --on ray
#
# HEAD is the name or address of one of the machines. It becomes the head, waits until all nodes have
# joined with all devices, runs the command, takes the cluster down and exits with the command's code.
# The others stay until the head is gone. Without a command the head stays as well, until SIGTERM.
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
    sed -n '2,22s/^# \{0,1\}//p' "$0" >&2
    exit 2
}

[ $# -ge 1 ] || usage
case $1 in -*) usage ;; esac
head_name=$1
shift
[ $# -eq 0 ] || { [ "$1" = "--" ] && shift; } || usage

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-python}
port=${PORT:-6379} nodes=${NODES:-1} join_timeout_s=${JOIN_TIMEOUT_S:-600}
device=${DEVICE:-none} count=${DEVICES_PER_NODE:-0} resources=${RESOURCES:-{\}}

# Address of the head, this machine's address on the network that leads there, and its interface.
read -r head_address address interface < <("$python" "$here/node_network.py" "$head_name" "${INTERFACE:-}")

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

if [ "$address" != "$head_address" ]; then
    echo "node $address ($interface) joins $head_address:$port" >&2
    until_s=$((SECONDS + join_timeout_s))
    # The head may be started later.
    until (exec 3<>"/dev/tcp/$head_address/$port") 2>/dev/null; do
        [ "$SECONDS" -lt "$until_s" ] || { echo "$head_address:$port: no head answers" >&2; exit 1; }
        sleep 2
    done
    ray start --address="$head_address:$port" "${options[@]}" --block &
    node=$!
    trap 'kill -TERM $node; wait $node; exit 143' TERM
    # Ends with an error when the head goes away, which is how the others learn that all is over.
    wait $node || echo "node $address has left the cluster" >&2
    exit 0
fi

echo "node $address ($interface) is the head, port $port" >&2
ray start --head --port="$port" "${options[@]}"
trap 'ray stop --grace-period 30 >&2 || true' EXIT
trap 'exit 143' TERM
expected=(--nodes "$nodes")
[ "$device" = none ] || expected+=(--resource "$device=$((nodes * count))")
"$python" "$here/wait_for_cluster.py" --address "$address:$port" --timeout "$join_timeout_s" "${expected[@]}"
if [ $# -gt 0 ]; then
    export RAY_ADDRESS="$address:$port"
    code=0
    "$@" || code=$?
    exit "$code"
fi
sleep infinity &
wait $!
