#!/bin/bash
set -x
BATCH=$((8 * 2))
python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files=$PWD/train.parquet \
    data.val_files=$PWD/test.parquet \
    data.train_batch_size=${BATCH} \
    data.max_prompt_length=64 \
    data.max_response_length=48 \
    actor_rollout_ref.model.path=models/tiny \
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=4 \
    trainer.logger='["console","wandb"]' \
    trainer.total_epochs=15 $@
