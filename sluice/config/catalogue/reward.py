"""`reward.*`, which holds verl's reward_model, custom_reward_function and sandbox_fusion too."""

from __future__ import annotations

from sluice.config.catalogue.entry import (
    Entry,
    block,
    group,
    honoured,
    inapplicable,
    mapped,
    refused,
    refused_if,
)

_KEY = "reward"
_BUFFER = f"{_KEY}.reward_kwargs.overlong_buffer_cfg"
_FUNCTION = f"{_KEY}.custom_reward_function"
_NO_MODEL = "sluice starts no server for a reward model; reward.reward_model.base_url names one"
_BATCH = refused_if(
    "batch",
    "it passes lists to the scorer; write a scorer for one response, it runs in many processes",
)

ENTRIES: tuple[Entry, ...] = (
    honoured(
        f"{_KEY}.reward_manager.name",
        verl_default="naive",
        refusals=_BATCH,
        advice="dapo for DAPO. prime, rate_limited, limited and remote are taken as naive",
    ),
    refused(
        f"{_KEY}.reward_manager.source",
        str,
        "register",
        "Where the manager is looked up.",
        "managers of your own are not loaded; write a custom reward function",
    ),
    block(
        f"{_KEY}.reward_manager.module",
        "File and name of a manager of one's own.",
        "managers of your own are not loaded",
    ),
    honoured(f"{_BUFFER}.enable", advice="true in DAPO"),
    honoured(
        f"{_BUFFER}.len", unit="tokens", advice="A fifth of max_response_length: 4096 of 20480"
    ),
    honoured(f"{_BUFFER}.penalty_factor", advice="1.0"),
    honoured(f"{_BUFFER}.log"),
    honoured(
        f"{_KEY}.reward_kwargs.max_resp_len",
        unit="tokens",
        verl_default="null, which is an error with the overlong buffer",
    ),
    block(
        f"{_KEY}.reward_kwargs",
        "Further arguments of verl's reward manager.",
        "managers take overlong_buffer_cfg and max_resp_len only",
    ),
    honoured(f"{_FUNCTION}.path", advice="A Python file, or pkg://package.module"),
    honoured(f"{_FUNCTION}.name"),
    honoured(f"{_FUNCTION}.reward_kwargs"),
    mapped(
        f"{_KEY}.num_workers",
        int,
        1,
        "Processes that score.",
        "sets reward.scorer_pool.num_workers",
        verl_default="8",
        targets=(f"{_KEY}.scorer_pool.num_workers",),
    ),
    honoured(
        f"{_KEY}.scorer_pool.num_workers",
        unit="processes",
        advice="1 for rules; more for slow functions",
    ),
    honoured(f"{_KEY}.scorer_pool.timeout_s", unit="seconds"),
    honoured(f"{_KEY}.scorer_pool.memory_mb", unit="MiB"),
    honoured(f"{_KEY}.scorer_pool.max_response_chars", unit="characters"),
    honoured(
        f"{_KEY}.reward_model.enable",
        advice="Set base_url with it: start the server yourself, on devices of its own",
    ),
    honoured(f"{_KEY}.reward_model.base_url"),
    honoured(f"{_KEY}.reward_model.model_path"),
    honoured(f"{_KEY}.reward_model.prompt_template"),
    honoured(f"{_KEY}.reward_model.score_pattern"),
    honoured(f"{_KEY}.reward_model.min_score"),
    honoured(f"{_KEY}.reward_model.max_score"),
    honoured(f"{_KEY}.reward_model.max_tokens", unit="tokens"),
    honoured(f"{_KEY}.reward_model.request_timeout_s", unit="seconds"),
    honoured(f"{_KEY}.reward_model.max_attempts"),
    honoured(f"{_KEY}.reward_model.api_key_env"),
    honoured(f"{_KEY}.scorer_routes"),
    inapplicable(
        f"{_KEY}.reward_model.enable_resource_pool",
        bool,
        False,
        "Devices of its own for that model.",
        _NO_MODEL,
        silent=(False,),
    ),
    inapplicable(
        f"{_KEY}.reward_model.n_gpus_per_node", int, 8, "Such devices a machine.", _NO_MODEL
    ),
    inapplicable(f"{_KEY}.reward_model.nnodes", int, 0, "Such machines.", _NO_MODEL, silent=(0,)),
    inapplicable(
        f"{_KEY}.reward_model.launch_reward_fn_async",
        bool,
        False,
        "Score while log-probabilities are computed.",
        "responses are scored as soon as they are finished",
        silent=(True, False),
    ),
    inapplicable(
        f"{_KEY}.reward_model.use_reward_loop",
        bool,
        True,
        "Score while responses are generated.",
        "responses are scored as soon as they are finished",
        silent=(True,),
    ),
    *group(
        f"{_KEY}.reward_model",
        {
            "strategy": "fsdp",
            "micro_batch_size": None,
            "micro_batch_size_per_gpu": None,
            "max_length": None,
            "use_dynamic_bsz": False,
            "forward_max_token_len_per_gpu": 32768,
            "ulysses_sequence_parallel_size": 1,
            "nccl_timeout": 600,
            "load_weight": True,
            "reward_loop_source": None,
            "reward_loop_module_path": None,
            "reward_loop_class_name": None,
            "model.input_tokenizer": None,
            "model.external_lib": None,
            "model.trust_remote_code": False,
            "model.use_shm": False,
            "model.use_remove_padding": False,
            "model.use_fused_kernels": False,
        },
        "Setting of the model that scores.",
        _NO_MODEL,
    ),
    *(
        block(f"{_KEY}.reward_model.{name}", "Settings of the model that scores.", _NO_MODEL)
        for name in (
            "rollout",
            "model.fsdp_config",
            "model.override_config",
            "megatron",
            "profiler",
        )
    ),
    refused(
        f"{_KEY}.sandbox_fusion.url",
        str | None,
        None,
        "Server that runs generated code.",
        "no scorer runs code; call the server from a custom reward function",
    ),
    inapplicable(
        f"{_KEY}.sandbox_fusion.max_concurrent", int, 64, "Requests at once.", "no scorer runs code"
    ),
    inapplicable(
        f"{_KEY}.sandbox_fusion.memory_limit_mb",
        int,
        1024,
        "Memory of such code.",
        "no scorer runs code; reward.scorer_pool.memory_mb bounds scorers",
        unit="MiB",
    ),
)
