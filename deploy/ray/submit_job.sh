#!/usr/bin/env bash
# Hands a run to a Ray cluster as a job, from any machine that reaches its job server (ray[default] on
# the head, port 8265):
#
#   RAY_API_SERVER_ADDRESS=http://10.0.0.1:8265 deploy/ray/submit_job.sh run.yaml sluice.run_dir=/shared/runs/run
#
# The job's driver is `sluice up --on ray` on the head node, where sluice has to be on the PATH with which
# `ray start` was called, as in an activated environment. Paths in the configuration are those of the
# nodes: the working directory that is sent along is for small files (the configuration, a reward
# function), not for models and data. A relative sluice.run_dir is refused: the run's folder would lie in
# that directory's copy, which Ray deletes when the job is over.
#
# Variables:
#   RAY_API_SERVER_ADDRESS  of the job server
#   RESOURCES               words SERVICE=NAME:AMOUNT, as `sluice up --resources` takes them
#   ENVIRONMENT             variables of every service, JSON ({})
#   WORKING_DIR             is sent to the cluster (.)
#   PYTHON                  an interpreter that has ray (python)
set -euo pipefail

[ $# -ge 1 ] || { sed -n '2,18s/^# \{0,1\}//p' "$0" >&2; exit 2; }

options=()
for one in ${RESOURCES:-}; do options+=(--resources "$one"); done
environment=${ENVIRONMENT:-{\}}

# The last override counts, else the file, which is relative to what is sent.
run_dir='' source=''
for one in "$@"; do
    case $one in
        sluice.run_dir=* | +sluice.run_dir=* | ++sluice.run_dir=*) source="$one" run_dir=${one#*=} ;;
    esac
done
case $1 in -* | *=*) ;; *)
    if [ -z "$source" ]; then
        source="sluice.run_dir of $1"
        run_dir=$(cd "${WORKING_DIR:-.}" && "${PYTHON:-python}" -c 'import sys, yaml
with open(sys.argv[1], encoding="utf-8") as file:
    found = yaml.safe_load(file) or {}
print((found.get("sluice") or {}).get("run_dir") or "")' "$1") || {
            echo "$1 cannot be read; give sluice.run_dir=/..., a folder of the nodes, as a word" >&2
            exit 2
        }
    fi ;;
esac
case $run_dir in
    /* | '${'*) ;;
    *)
        echo "${source:-sluice.run_dir}: ${run_dir:-its default} is no absolute path, so the run's folder would be" \
            "lost with Ray's copy of the working directory; give sluice.run_dir=/..., a folder that all nodes" \
            "share" >&2
        exit 2
        ;;
esac

exec ray job submit \
    --working-dir "${WORKING_DIR:-.}" \
    --runtime-env-json "{\"env_vars\": $environment}" \
    -- sluice up "$@" --on ray ${options[@]+"${options[@]}"}
