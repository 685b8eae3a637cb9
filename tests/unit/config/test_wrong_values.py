"""Wrong values, one a row: each is refused alone, by a sentence with key, value and remedy."""

from __future__ import annotations

import pytest

from sluice.config.loading.loader import load_config
from sluice.config.problems import Problem
from sluice.config.rules.checks import relation_problems
from sluice.errors import ConfigError

A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
LOSS, FSDP, MEGATRON = f"{A}.policy_loss", f"{A}.fsdp_config", f"{A}.megatron"
CORRECTION, FILTER = "algorithm.rollout_correction", "algorithm.filter_groups"
SHAPING = "reward.reward_kwargs.overlong_buffer_cfg"
SHAPED = f"reward.reward_manager.name=dapo {SHAPING}.enable=true"
MODEL = "reward.reward_model"
ADPO, GAE = "algorithm.adv_estimator=adpo", "algorithm.adv_estimator=gae"
SKIPPING = "sluice.trainer.skip_zero_advantage=true"
PROBES = f"{R}.n=16 {FILTER}.enable=true sluice.sampling.strategy"
STALE = "sluice.asynchrony.max_staleness=1"
SOUND = (
    "data.train_files=train.parquet",
    "data.train_batch_size=64",
    f"{A}.ppo_mini_batch_size=32",
    f"{A}.ppo_micro_batch_size_per_gpu=4",
    f"{R}.n=8",
)

TYPES = (
    (f"{MEGATRON}.tensor_model_parallel_size=two", "= two: expected an integer"),
    (f"{A}.ppo_micro_batch_size=0", "ppo_micro_batch_size = 0: expected an integer >= 1 or null"),
    (
        f"{GAE} critic.ppo_micro_batch_size=0 critic.ppo_micro_batch_size_per_gpu=null",
        "critic.ppo_micro_batch_size = 0: expected an integer >= 1 or null",
    ),
    (f"{R}.log_prob_micro_batch_size_per_gpu=-1", "= -1: expected an integer >= 1 or null"),
    (f"{MEGATRON}.context_parallel_size=0", "context_parallel_size = 0: expected an integer >= 1"),
    ("data.train_batch_size='64'", "= '64': expected an integer >= 1; write it without quotes"),
    ("data.train_batch_size=8.0", "expected an integer >= 1; write it without a decimal point"),
    ("data.seed=007", "= '007': expected an integer or null; write 7; 007 is text to Hydra"),
    ("data.seed=0x1F", "expected an integer or null; write 31; 0x1F is text to Hydra"),
    (f"{A}.optim.lr=01e-6", "expected a number > 0; write 1e-06; 01e-6 is text to Hydra"),
    ("data.seed=None", "= None: expected an integer or null; the word for nothing is null"),
    ("trainer.val_only=yes", "= yes: expected true or false; YAML 1.2 has no other words for them"),
    ("data.prompt_key=7", "= 7: expected a string; put the value in quotes"),
    ("data.train_files={a: 1}", "expected a string or a list with each element a string"),
    (f"{FSDP}.param_offload=1", "= 1: expected true or false"),
    ("actor_rollout_ref.model.lora_rank=-1", "lora_rank = -1: expected an integer >= 0"),
    ("actor_rollout_ref.model.lora_alpha=-1", "lora_alpha = -1: expected a number > 0"),
    (f"{R}.gpu_memory_utilization=1.5", "= 1.5: expected a number > 0 and <= 1"),
    (f"{R}.temperature=0", "temperature = 0: expected a number > 0"),
    (f"{A}.clip_ratio_c=1.0", "clip_ratio_c = 1: expected a number > 1"),
    (f"{A}.loss_agg_mode=mean", "loss_agg_mode = mean: expected one of token-mean, token-sum"),
    (f"{R}.name=tgi", "rollout.name = tgi: expected one of torch, vllm, sglang"),
    (f"{R}.mode=sometimes", "expected one of async, sync"),
    ("algorithm.kl_penalty=k9", "expected one of kl, k1"),
    ("trainer.v1.trainer_mode=later", "expected one of sync, colocate_async, separate_async"),
    (f"{A}.checkpoint.save_contents=[weights]", "= [weights]: expected a list with each element"),
    ("reward_model.overlong_buffer.len=long", "reward_model.overlong_buffer.len = long: expected"),
    (
        f"+{MEGATRON}.override_transformer_config.recompute_granularity=half",
        "expected one of full, selective or null",
    ),
    (f"{MEGATRON}=2", f"{MEGATRON} = 2: expected keys below it"),
    (f"{R}.top_k=-3", "top_k = -3: expected -1 (off) or at least 1"),
    (f"{R}.val_kwargs.top_k=-2", "val_kwargs.top_k = -2: expected"),
    (f"{A}.optim.betas=[0.9,1.0]", "= [0.9, 1]: expected a list of 2: a number >= 0 and < 1"),
    (f"{A}.loss_scale_factor=0", "loss_scale_factor = 0: expected an integer >= 1 or null"),
)
UNKNOWN = (
    ("tainer.device=npu", "tainer.device: unknown key; did you mean trainer.device?"),
    (f"+{A}.new_switch=1", "new_switch: unknown key"),
    (f"+{MEGATRON}.new_size=2", "new_size: unknown key"),
    ("+reward_model.new_switch=1", "reward_model.new_switch: unknown key"),
    ("+new_section.switch=1", "new_section: unknown key; the root knows data, actor_rollout_ref"),
    ("critic={optim: {lrr: 1}}", "critic.optim.lrr: unknown key; did you mean critic.optim.lr?"),
    ("algorithm.adv_estimator=gae2", "adv_estimator = gae2: expected one of gae, grpo"),
    (f"{LOSS}.loss_mode=best", "loss_mode = best: expected one of vanilla, dppo_tv"),
    ("trainer.device=tpu", "trainer.device = tpu is unknown; choose from cpu, cuda, npu"),
)
REFUSED = (
    ("data.train_batch_size=0", "a batch needs prompts; in place of verl's fully asynchronous"),
    ("data.train_batch_size=0", f"set it to {A}.ppo_mini_batch_size * async_training.require"),
    (f"{A}.use_gpg_loss=true", f"set {LOSS}.loss_mode=gpg"),
    (f"{A}.kl_loss_type=full", "= full is refused: it needs the whole distribution"),
    (f"{R}.name=trtllm", f"torch, vllm and sglang; set {R}.name=vllm"),
    (f"{R}.pipeline_model_parallel_size=2", "= 2 is refused: engines run without pipeline stages"),
    ("data.train_files=hdfs://data/train.parquet", "nothing is fetched from HDFS; copy the files"),
    ("data.val_files=['a.parquet','hdfs://b.parquet']", "nothing is fetched from HDFS"),
    ("actor_rollout_ref.model.lora.type=dora", "adapters are plain; set it to lora"),
    ("critic.model.lora_rank=8", "all weights of a critic are trained; leave the key out"),
    ("actor_rollout_ref.model.path=hdfs://model", "nothing is fetched from HDFS; copy the model"),
    ("trainer.resume_from_path=hdfs://run/global_step_1", "nothing is read from or written to"),
    ("reward_model.reward_manager=batch", "write a scorer for one response"),
    ("trainer.logger=['console','clearml']", "no logger clearml; use mlflow or wandb"),
    (f"{A}.strategy=fspd2", "strategy = fspd2 is refused: verl has no such backend"),
    (f"{GAE} critic.strategy=fspd2", "critic.strategy = fspd2 is refused: verl has no such"),
    (f"{A}.optim.optimizer=muon", "AdamW is the only optimizer"),
    (f"{A}.optim.decay_type=sqrt", "may fall linear or cosine"),
    (f"{A}.optim.lr_decay_style=WSD", "constant, linear, cosine or inverse_square_root"),
)
BATCHES = (
    (f"{A}.ppo_mini_batch_size=128", "= 128 is more than data.train_batch_size = 64"),
    (f"{A}.ppo_mini_batch_size=24", "is no multiple of"),
    ("trainer.n_gpus_per_node=512", "leaves some of 512 trainer ranks without work; raise it"),
    (f"~{A}.ppo_micro_batch_size_per_gpu", "_per_gpu = null while"),
    (f"{R}.n=1 algorithm.adv_estimator=rloo_vectorized", "a group of one has no advantage; set n"),
    (f"{R}.n=1 {FILTER}.enable=true", "of a group of one never differ; set n to 2 or more"),
    (f"{R}.n=300", "rollout.n = 300 is more than sluice.rollout.max_n = 256; raise max_n"),
    (f"{R}.val_kwargs.n=300", "val_kwargs.n = 300 is more than"),
    (
        f"{R}.max_num_seqs=4 sluice.rollout.max_queued=3",
        "n = 8 is more than a replica takes: actor_rollout_ref.rollout.max_num_seqs = 4 and "
        "sluice.rollout.max_queued = 3 waiting",
    ),
    (f"{R}.max_model_len=1000", "max_model_len = 1000 cannot hold prompt and response of 1024"),
    (
        f"{R}.name=sglang {A}.router_replay.mode=R3",
        "mode = R3 with actor_rollout_ref.rollout.name = sglang: its adapter does not return",
    ),
    (
        f"{R}.name=vllm {A}.router_replay.mode=R3 {R}.enable_prefix_caching=false",
        "enable_prefix_caching = false with actor_rollout_ref.actor.router_replay.mode = R3: vLLM",
    ),
    (
        f"{A}.router_replay.mode=R2 {CORRECTION}.bypass_mode=true",
        "mode = R2 with algorithm.rollout_correction.bypass_mode = true: no pass computes old logp",
    ),
    (
        f"{A}.router_replay.mode=R2 {LOSS}.loss_mode=bypass_mode",
        "mode = R2 with actor_rollout_ref.actor.policy_loss.loss_mode = bypass_mode: no pass",
    ),
    (
        f"{A}.router_replay.mode=R2 {A}.use_rollout_log_probs=true",
        "mode = R2 with actor_rollout_ref.actor.use_rollout_log_probs = true: no pass",
    ),
    (
        "sluice.max_message_mb=3 data.max_response_length=350000",
        "max_message_mb = 3 is less than the 5 MiB that one sample, or the outline of a train",
    ),
    (f"{ADPO} algorithm.num_generations=4", "num_generations = 4 differs from"),
)
TRAINING = (
    (f"{A}.clip_ratio=0.3", "clip_ratio = 0.3 has no effect while clip_ratio_low and"),
    (f"{A}.clip_ratio_low=1.0", "1 - clip_ratio_low, must be positive; set it below 1"),
    (f"{LOSS}.loss_mode=gspo {A}.clip_ratio_low=1.0", "1 - clip_ratio_low, must be positive"),
    (f"{SHAPED} {SHAPING}.penalty_factor=1", "len = 0: expected 1 to the response limit of"),
    (f"{SHAPED} {SHAPING}.len=8", "penalty_factor = 0 would have no effect; set it above 0"),
    (
        f"{SHAPING}.enable=true {SHAPING}.len=8 {SHAPING}.penalty_factor=1 "
        "reward.reward_manager.name=naive",
        "enable = true with reward.reward_manager.name = naive would have no effect; set reward.",
    ),
    ("trainer.test_freq=5", "= 5 with data.val_files = null: there is nothing to validate; give"),
    ("trainer.val_only=true", "there is nothing to validate; give val_files"),
    (
        "trainer.val_only=true trainer.val_before_train=false data.val_files=v.parquet",
        "would do nothing; set val_before_train=true",
    ),
    ("trainer.resume_mode=resume_path", "resume_from_path = null with trainer.resume_mode"),
    ("trainer.resume_from_path=x", "= x has no effect with trainer.resume_mode = auto; set"),
    (f"reward_model.enable=true {MODEL}.model_path=m", "base_url = null with reward.reward_model."),
    (f"reward_model.enable=true {MODEL}.base_url=u", "model_path = null with reward.reward_model."),
    (f"{MODEL}.min_score=2", "min_score = 2 is above max_score = 1; swap them"),
)
ALGORITHMS = (
    (f"{ADPO} {LOSS}.loss_mode=vanilla", "set both to adpo or neither"),
    (f"algorithm.adv_estimator=grpo {LOSS}.loss_mode=adpo", "set both to adpo or neither"),
    (
        f"{ADPO} {CORRECTION}.rollout_rs=token_k1 {CORRECTION}.rollout_rs_threshold=2",
        "loss_mode = adpo: it compares whole responses of complete groups",
    ),
    (
        f"{ADPO} {CORRECTION}.bypass_mode=true",
        "bypass_mode = true replaces actor_rollout_ref.actor.policy_loss.loss_mode = adpo by its "
        "own loss; set bypass_mode=false",
    ),
    (f"{LOSS}.loss_mode=gspo {CORRECTION}.bypass_mode=true", "loss_mode = gspo by its own loss"),
    (f"{GAE} critic.enable=false", "set critic.enable=null, or another estimator"),
    (f"{GAE} critic.ppo_mini_batch_size=24", "= 24 does not divide data.train_batch_size = 64"),
    (
        f"{GAE} {A}.use_dynamic_bsz=true {A}.ppo_micro_batch_size_per_gpu=null "
        "critic.use_dynamic_bsz=false",
        "critic.ppo_micro_batch_size_per_gpu = null while critic.use_dynamic_bsz is false; set",
    ),
    ("algorithm.adv_estimator=gdpo", "gdpo_reward_keys = null with algorithm.adv_estimator = gdpo"),
    (
        "algorithm.gdpo_reward_keys=[a,b] algorithm.gdpo_reward_weights=[1.0]",
        "gdpo_reward_weights = [1] has 1 entries for 2 algorithm.gdpo_reward_keys; give one",
    ),
    (f"{LOSS}.loss_mode=dro", "dro_beta = null with loss_mode = dro; set the weight"),
    (f"{CORRECTION}.rollout_is_threshold=2_0.5", "the lower bound is above the upper"),
    (f"{CORRECTION}.rollout_rs=token_k9", "rollout_rs = 'token_k9': expected one or more"),
    (f"{CORRECTION}.rollout_rs=token_k1", "rollout_rs_threshold = None: expected one"),
    (f"{CORRECTION}.rollout_rs_threshold=2.0", "has no effect while rollout_rs is null; name"),
    (
        f"{A}.use_rollout_log_probs=true {CORRECTION}.rollout_is=token",
        "rollout_is = token with actor_rollout_ref.actor.use_rollout_log_probs = true would",
    ),
    (f"{STALE} {CORRECTION}.rollout_is=null", "max_staleness = 1 with actor_rollout_ref.actor.use"),
    (
        "sluice.trainer.turn_rewards=true algorithm.adv_estimator=rloo",
        "to one of gae, grpo, grpo_vectorized, reinforce_plus_plus",
    ),
    (
        "sluice.trainer.turn_rewards=true algorithm.use_kl_in_reward=true",
        "set use_kl_in_reward=false and actor_rollout_ref.actor.use_kl_loss=true, or norm_adv_by_",
    ),
    (f"{SKIPPING} {A}.use_kl_loss=true", "or use_kl_loss=false"),
    (f"{SKIPPING} algorithm.use_kl_in_reward=true", "or use_kl_in_reward=false"),
    (f"{SKIPPING} {A}.entropy_coeff=0.01", "or entropy_coeff=0"),
    (f"{SKIPPING} {GAE}", "or critic.enable=false"),
    (f"{SKIPPING} {LOSS}.loss_mode=kl_cov", "loss_mode = kl_cov: that loss reads samples"),
    (f"{SKIPPING} {ADPO}", "loss_mode = adpo: that loss reads samples"),
    (f"{SKIPPING} {A}.calculate_entropy=true", "or calculate_entropy=false"),
    (f"{SKIPPING} algorithm.adv_estimator=reinforce_plus_plus", "hardly any is 0"),
    (f"{SKIPPING} algorithm.adv_estimator=optimal_token_baseline", "another estimator, such as"),
    (
        f"{SKIPPING} {CORRECTION}.rollout_is=token {CORRECTION}.rollout_is_batch_normalize=true",
        "or rollout_is_batch_normalize=false",
    ),
    (
        f"{SKIPPING} algorithm.adv_estimator=opo {CORRECTION}.rollout_rs=token_k2 "
        f"{CORRECTION}.rollout_rs_threshold=1",
        "rollout_rs = token_k2 and algorithm.adv_estimator = opo: advantages or weights need",
    ),
)
SERVICES = (
    (f"{PROBES}=rounds {STALE}", "set sluice.asynchrony.max_staleness=0, or"),
    ("sluice.sampling.strategy=rounds", "= rounds with algorithm.filter_groups.enable = false"),
    ("sluice.sampling.strategy=memory", "there is nothing to choose; set algorithm.filter_groups"),
    (
        f"{PROBES}=staged sluice.sampling.probe_samples=16",
        "set sluice.sampling.probe_samples",
    ),
    (f"{PROBES}=staged_memory sluice.sampling.probe_samples=1", "set it to 2 or more"),
    (
        "sluice.reward.stall_timeout_s=1 sluice.reward.partial_interval_ms=1000",
        "stall_timeout_s = 1 with sluice.reward.partial_interval_ms = 1000: a group that makes "
        "progress would count as stalled; set stall_timeout_s to at least 4",
    ),
    (
        "sluice.reward.group_token_budget=100",
        "group_token_budget = 100 is below the response",
    ),
    (
        "sluice.reward.endpoint.host=0.0.0.0",
        "is no address that peers can reach; set",
    ),
    (
        "sluice.reward.endpoint.port=7000 sluice.trainer.endpoint.port=7000",
        "sluice.trainer.endpoint.port = 7000 is taken by sluice.reward.endpoint.port; give each",
    ),
    (
        "sluice.reward.endpoint.health_port=8080 sluice.rollout.endpoint.health_port=8080",
        "health_port = 8080 is taken by sluice.reward.endpoint.health_port; give each",
    ),
    (
        "sluice.reward.endpoint.health_port=7000 sluice.reward.endpoint.port=7000",
        "health_port = 7000 is taken by sluice.reward.endpoint.port",
    ),
    (
        "sluice.rollout.endpoint.port=7000 sluice.rollout.replicas=2",
        "all replicas would take one port; set it to 0 to have one chosen",
    ),
    (
        "sluice.rollout.endpoint.health_port=8080 sluice.rollout.replicas=2",
        "health_port = 8080 with sluice.rollout.replicas = 2: all replicas would take one port",
    ),
    ("sluice.watchdog.stall_s=0.5", "stall_s = 0.5: a healthy service pauses that long; set it"),
    ("sluice.watchdog.stall_s=1800", "stall_s = 1800 is not below give_up_s = 1800"),
    ("sluice.trainer.replica_ttl_s=1.5", "replica_ttl_s = 1.5 is less than two heartbeats"),
    ("sluice.trainer.replica_stall_s=1.5", "replica_stall_s = 1.5 is less than two heartbeats"),
    ("sluice.rollout.drain_timeout_s=60", "= 60 is more than a service may take to end"),
)
ROWS = (
    *TYPES,
    *UNKNOWN,
    *REFUSED,
    *BATCHES,
    *TRAINING,
    *ALGORITHMS,
    *SERVICES,
)


def refusals(*overrides: str) -> list[str]:
    try:
        config = load_config(None, [*SOUND, *overrides])
    except ConfigError as error:
        return [str(error)]
    return [problem.text for problem in relation_problems(config)]


def test_a_sound_configuration_has_no_problem() -> None:
    assert refusals() == []


@pytest.mark.parametrize(("overrides", "words"), ROWS, ids=[row[0] for row in ROWS])
def test_a_wrong_value_is_refused_with_its_remedy(overrides: str, words: str) -> None:
    given = [overrides] if "{" in overrides else overrides.split()
    (found,) = refusals(*given)
    assert words in found


@pytest.mark.parametrize(
    "overrides",
    [
        # verl would refuse each: the rows of a rank may differ here, and a row longer than the
        # budget gets a micro-batch of its own.
        "trainer.n_gpus_per_node=3",
        f"{A}.ppo_micro_batch_size_per_gpu=7",
        f"{A}.use_dynamic_bsz=true {A}.ppo_max_token_len_per_gpu=1023",
        "algorithm.num_generations=4",
        # The lower bound of these losses is not 1 - clip_ratio_low.
        *(
            f"{LOSS}.loss_mode={loss} {A}.clip_ratio_low=10"
            for loss in ("cispo", "dppo_tv", "dppo_kl", "geo_mean", "kl_cov")
        ),
        ADPO,
        GAE,
        f"{GAE} critic.enable=true",
        f"algorithm.use_kl_in_reward=true {A}.use_kl_loss=true",
        f"{LOSS}.loss_mode=dro {LOSS}.dro_beta=0.1",
        f"{CORRECTION}.bypass_mode=true",
        SKIPPING,
        f"{SKIPPING} {CORRECTION}.bypass_mode=true",
        f"{LOSS}.loss_mode=bypass_mode {CORRECTION}.bypass_mode=true",
        f"{CORRECTION}.rollout_rs='token_k1,seq_mean_k3' {CORRECTION}.rollout_rs_threshold=2",
        *(f"{PROBES}={name}" for name in ("rounds", "stream", "staged", "memory", "staged_memory")),
        f"{FILTER}.enable=true sluice.asynchrony.max_staleness=3",
        "sluice.sampling.probe_samples=64",
        f"{PROBES}=memory sluice.sampling.probe_samples=64",
        f"+{R}.engine_kwargs.vllm.enable_expert_parallel=True",
        f"+{MEGATRON}.override_transformer_config.moe_new_switch=True",
        f"+{A}.optim.override_optimizer_config.new_switch=0.5",
        "+data.apply_chat_template_kwargs.enable_thinking=False",
        "+reward.reward_kwargs.new_argument=1",
        "+custom_reward_function.reward_kwargs.strict=True",
        "+actor_rollout_ref.model.override_config.attn_implementation=eager",
    ],
)
def test_what_goes_together_is_let_through(overrides: str) -> None:
    assert refusals(*overrides.split()) == []


def test_a_problem_is_one_sentence_of_key_value_message_and_remedy() -> None:
    problem = Problem("a.b", "it's", "is wrong", overrides=("a.b=1", "c=null"))
    assert problem.text == 'a.b = "it\'s" is wrong; set a.b=1 c=null'
    assert Problem("a.b", None, ": expected a number", "give one").text == (
        "a.b = null: expected a number; give one"
    )
