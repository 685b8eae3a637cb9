"""`data.*`."""

from __future__ import annotations

from sluice.config.catalogue.entry import (
    Entry,
    block,
    honoured,
    inapplicable,
    refused,
    refused_prefix,
    unread,
)

_HDFS = refused_prefix("hdfs://", "nothing is fetched from HDFS; copy the files to a local disk")
_OWN_PROCESSOR = "images are prepared as the model's own processor says"
_CHAT = "rows always keep their messages; the rollout service applies the chat template"

ENTRIES: tuple[Entry, ...] = (
    honoured(
        "data.train_files",
        verl_default="~/data/rlhf/gsm8k/train.parquet",
        refusals=_HDFS,
        advice=(
            "DAPO-Math-17k holds every prompt about a hundred times (1.8 million rows): set "
            "trainer.total_training_steps or drop the copies. Every data_source needs a scorer"
        ),
    ),
    honoured(
        "data.val_files",
        verl_default="~/data/rlhf/gsm8k/test.parquet",
        refusals=_HDFS,
        advice=(
            "The usual AIME 2024 file repeats its 30 problems 32 times, so one sample a row is "
            "already an average over 32"
        ),
    ),
    honoured("data.prompt_key"),
    honoured("data.reward_fn_key"),
    honoured(
        "data.max_prompt_length",
        unit="tokens",
        effect="Sets, with max_response_length, the longest row: memory of a micro-batch of rows",
        advice="The longest prompt of the data; 1024 to 2048 is usual for mathematics",
    ),
    honoured(
        "data.max_response_length",
        unit="tokens",
        effect="Memory of the engine's cache and of the update; the longest responses set the pace",
        advice=(
            "Raise it while response_length/clip_ratio is above 0.1: answers are being cut off. "
            "20480 for long reasoning, 2048 and less for short answers"
        ),
    ),
    honoured(
        "data.train_batch_size",
        unit="prompts",
        effect="Time of a step grows with it; memory of the trainer does not",
        advice="At least actor.ppo_mini_batch_size and a multiple of it; 64 to 512 is usual",
    ),
    unread(
        "data.gen_batch_size",
        "groups are issued one by one as slots become free, so there are no rounds, but with "
        "sluice.sampling.strategy=rounds; else the value only enters the conversion of "
        "algorithm.filter_groups.max_num_gen_batches",
        unit="prompts",
        verl_default="train_batch_size",
        advice="In verl two to three times train_batch_size while filtering; no need for it here",
        silent=(None,),
    ),
    inapplicable(
        "data.val_batch_size",
        int | None,
        None,
        "Rows per validation batch.",
        "the whole validation set is issued at once, as verl does without the key",
        silent=(None,),
    ),
    honoured("data.shuffle"),
    honoured("data.seed", verl_default="null, which leaves the order to chance"),
    honoured("data.validation_shuffle"),
    honoured(
        "data.truncation",
        advice="left keeps the question's end; error where no prompt should be too long",
        verl_default="error, though recent versions always cut on the left",
    ),
    honoured(
        "data.filter_overlong_prompts",
        effect="One tokenisation of each prompt",
        advice="Switch on for data with a few very long prompts",
    ),
    inapplicable(
        "data.filter_overlong_prompts_workers",
        int,
        1,
        "Processes that measure prompts before the start.",
        "prompts are measured as they are issued, so nothing waits for a pass over the data",
        silent=(1,),
    ),
    honoured("data.train_max_samples", unit="rows"),
    honoured("data.val_max_samples", unit="rows"),
    honoured(
        "data.deduplicate",
        effect="8 bytes a row in the reward service; the files are read once at the start",
        advice="true for the published DAPO-Math-17k, which repeats each prompt about 100 times",
    ),
    honoured(
        "data.shuffle_buffer_rows",
        unit="rows",
        effect="Memory of the reward service",
        advice="lower it for rows with images in them: 16384 of 100 KiB are 1.6 GiB",
    ),
    inapplicable(
        "data.dataloader_num_workers",
        int,
        8,
        "Processes that read data.",
        "one reader streams the Parquet files",
    ),
    honoured(
        "data.image_key",
        advice="where the model reads no images, a data set that holds some is refused, by file "
        "and row",
    ),
    unread("data.image_patch_size", _OWN_PROCESSOR, unit="pixels", silent=(14,)),
    honoured("data.apply_chat_template_kwargs"),
    unread("data.mm_processor_kwargs", _OWN_PROCESSOR, silent=({},)),
    unread(
        "data.trust_remote_code",
        "actor_rollout_ref.model.trust_remote_code decides, for model and tokenizer",
        silent=(False,),
    ),
    refused(
        "data.video_key",
        str,
        "videos",
        "Column with a row's videos.",
        "videos are not read; leave the key out",
    ),
    refused(
        "data.audio_key",
        str,
        "audios",
        "Column with a row's recordings.",
        "recordings are not read; leave the key out",
    ),
    inapplicable(
        "data.return_raw_chat", bool, True, "Keep messages in a batch.", _CHAT, silent=(True,)
    ),
    inapplicable(
        "data.return_raw_input_ids",
        bool,
        False,
        "Keep token ids in a batch.",
        _CHAT,
        silent=(False,),
    ),
    inapplicable(
        "data.return_full_prompt",
        bool,
        False,
        "Keep prompt texts in a batch.",
        _CHAT,
        silent=(False,),
    ),
    inapplicable(
        "data.return_multi_modal_inputs",
        bool,
        True,
        "Keep processor outputs in a batch.",
        _CHAT,
        silent=(True,),
    ),
    refused(
        "data.tool_config_path",
        str | None,
        None,
        "Tools for conversations of several turns.",
        "rollouts have one turn and no tools; leave the key out",
    ),
    refused(
        "data.function_tool_path",
        str | None,
        None,
        "Python functions offered as tools.",
        "rollouts have one turn and no tools; leave the key out",
    ),
    refused(
        "data.custom_cls.path",
        str | None,
        None,
        "File with a data set class of the user's.",
        "data sets are Parquet files; convert the rows, or submit prompts through the client",
    ),
    refused(
        "data.custom_cls.name",
        str | None,
        None,
        "Name of that class.",
        "data sets are Parquet files; convert the rows, or submit prompts through the client",
    ),
    refused(
        "data.sampler.class_path",
        str | None,
        None,
        "File with a curriculum sampler.",
        "the order is shuffled or as stored; submit prompts through the client for a curriculum",
    ),
    refused(
        "data.sampler.class_name",
        str | None,
        None,
        "Name of the curriculum sampler.",
        "the order is shuffled or as stored; submit prompts through the client for a curriculum",
    ),
    refused(
        "data.datagen.path",
        str | None,
        None,
        "File with a generator of data.",
        "submit prompts through the client instead",
    ),
    refused(
        "data.datagen.name",
        str | None,
        None,
        "Name of the generator of data.",
        "submit prompts through the client instead",
    ),
    refused(
        "data.tokenizer",
        str | None,
        None,
        "Tokenizer other than the model's.",
        "the tokenizer stands beside the model; put it into actor_rollout_ref.model.path",
    ),
    inapplicable(
        "data.use_shm",
        bool,
        False,
        "Copy data to shared memory.",
        "Parquet files are streamed from where they are",
        silent=(False,),
    ),
    block("data.dataloader_kwargs", "Arguments of the loader.", "there is no such loader"),
)
