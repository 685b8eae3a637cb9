#!/usr/bin/env bash
# Hands a run to a Ray cluster as a job, from any machine that reaches its job server (ray[default] on
# the head, port 8265):
#
#   RAY_API_SERVER_ADDRESS=http://10.0.0.1:8265 deploy/ray/submit_job.sh run.yaml trainer.save_freq=20
#
# The job's driver is `sluice up --on ray` on the head node. Paths in the configuration are those of the
# nodes: the working directory that is sent along is for small files (the configuration, a reward
# function), not for models and data.
#
# Variables:
#   RAY_API_SERVER_ADDRESS  of the job server
#   RESOURCES               words SERVICE=NAME:AMOUNT, as `sluice up --resources` takes them
#   ENVIRONMENT             variables of every service, JSON ({})
#   WORKING_DIR             is sent to the cluster (.)
set -euo pipefail

[ $# -ge 1 ] || { sed -n '2,16s/^# \{0,1\}//p' "$0" >&2; exit 2; }

options=()
for one in ${RESOURCES:-}; do options+=(--resources "$one"); done
environment=${ENVIRONMENT:-{\}}

exec ray job submit \
    --working-dir "${WORKING_DIR:-.}" \
    --runtime-env-json "{\"env_vars\": $environment}" \
    -- sluice up "$@" --on ray ${options[@]+"${options[@]}"}
