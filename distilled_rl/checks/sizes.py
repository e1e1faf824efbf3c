"""Rules on numbers that must fit together: sequence lengths, GPU pools, batches."""

from collections.abc import Iterator

from omegaconf import DictConfig, OmegaConf

from distilled_rl.checks import files
from distilled_rl.checks.values import (
    ACTOR,
    MODEL,
    REF,
    ROLLOUT,
    get,
    sequence_parallel,
    student,
    teachers,
    trainer_gpus,
    whole,
)
from distilled_rl.config import ConfigError
from distilled_rl.teacher.model_files import model_config
from distilled_rl.teacher.specs import teacher_specs


def lengths(config: DictConfig) -> Iterator[str]:
    """Every server takes the longest prompt with the longest response, and so does the trainer's token budget."""
    prompt, response = whole(config, "data.max_prompt_length"), whole(config, "data.max_response_length")
    longest = f"data.max_prompt_length={prompt} + data.max_response_length={response}"
    path = get(config, f"{MODEL}.path")
    yield from _server_lengths(config, f"{ROLLOUT}.max_model_len", path, prompt + response, longest)
    for key in teachers(config):  # verl/workers/config/distillation.py:172: a teacher server also generates one token
        limit, path = f"{key}.inference.max_model_len", get(config, f"{key}.model_path")
        yield from _server_lengths(config, limit, path, prompt + response + 1, f"{longest} + 1 generated token")
    for spec in teacher_specs(config):  # of a teacher behind a URL the server tells, see checks/teachers.py
        positions = _positions(spec.model) if spec.source == "colocated" else None
        if positions is not None and prompt + response > positions:
            yield (
                f"{spec.model_key}: max_position_embeddings is {positions}, but {longest} = {prompt + response}: shorten "
                "the lengths, or use another teacher"
            )
    if get(config, f"{ACTOR}.use_dynamic_bsz"):
        for key in (f"{ACTOR}.ppo_max_token_len_per_gpu", f"{ROLLOUT}.log_prob_max_token_len_per_gpu"):
            budget = whole(config, key) * sequence_parallel(config)
            if budget < prompt + response:  # verl/utils/seqlen_balancing.py:384
                yield f"{key} gives room for {budget} tokens, but {longest} = {prompt + response}: raise it to that"


def _server_lengths(config: DictConfig, key: str, path: str | None, needed: int, longest: str) -> Iterator[str]:
    limit = get(config, key)
    if limit is not None and whole(config, key) < needed:
        yield (
            f"{key} is {limit}, but {longest} = {needed}: raise dataset.max_model_len to {needed}, or shorten the "
            "lengths"
        )
    positions = _positions(path)
    # verl/workers/rollout/vllm_rollout/vllm_async_server.py:1103
    if positions is not None and max(limit or 0, needed) > positions:
        yield (
            f"{key} is {limit} for {longest} = {needed}, but max_position_embeddings of {path} is {positions}: shorten "
            "the lengths, and dataset.max_model_len with them"
        )


def _positions(path: str | None) -> int | None:
    """Return the longest sequence of a model, None where it is not known; a broken model is another rule's to name."""
    try:
        folder = files.model_folder(path) if path is not None else None
        return model_config(folder).get("max_position_embeddings") if folder is not None else None
    except ConfigError:
        return None


def sync_bucket(config: DictConfig) -> Iterator[str]:
    """On a CPU, the student's largest weight, its embedding, fits into the buffer that carries weights to vLLM."""
    if config.trainer.device != "cpu":  # elsewhere verl sends such a weight on its own
        return
    ours = student(config)
    try:
        folder = files.model_folder(ours.path) if ours is not None else None
        model = model_config(folder) if folder is not None else {}
    except ConfigError:
        return  # another rule's to name
    entries = (model.get("vocab_size") or 0) * (model.get("hidden_size") or 0)
    needed = entries * (4 if get(config, f"{ACTOR}.fsdp_config.model_dtype") in ("fp32", "float32") else 2)
    key = f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes"
    if needed > whole(config, key) << 20:  # verl/workers/rollout/vllm_rollout/bucketed_weight_transfer.py:142
        yield (
            f"{key} is {whole(config, key)}, but the embedding of {ours and ours.path} takes {needed / 2**20:.1f} MiB: raise it to "
            f"{-(-needed >> 20)}"
        )


def pools(config: DictConfig) -> Iterator[str]:
    """Trainer and teacher pool split into whole replicas, and Ray has been told of as many GPUs as they take."""
    gpus = trainer_gpus(config)
    if gpus % (replica := _replica(config, ROLLOUT)):  # verl/workers/engine_workers.py:659
        yield (
            f"{ROLLOUT}.tensor_model_parallel_size: {gpus} trainer GPU(s) (trainer.n_gpus_per_node x nnodes) do not "
            f"split into rollout replicas of {replica}; use a divisor"
        )
    if served := teachers(config):
        pool = whole(config, "distillation.n_gpus_per_node") * whole(config, "distillation.nnodes")
        replicas = {key: _replica(config, f"{key}.inference") for key in served}
        if len(served) == 1:  # verl/workers/config/distillation.py:283
            if pool % (replica := next(iter(replicas.values()))):
                yield (
                    f"distillation.n_gpus_per_node: a teacher pool of {pool} GPU(s) does not split into replicas of "
                    f"{replica}; change teacher.n_gpus or teacher.tensor_parallel"
                )
        else:  # verl/workers/config/distillation.py:263
            taken = sum(size * whole(config, f"{key}.num_replicas") for key, size in replicas.items())
            if taken != pool:
                yield (
                    f"distillation.n_gpus_per_node: the teacher pool has {pool} GPU(s), the teachers take {taken}; "
                    "make them equal"
                )
        gpus += pool
    declared = OmegaConf.select(config, "ray_kwargs.ray_init.num_gpus")
    if declared is not None and declared < gpus:
        yield (
            f"ray_kwargs.ray_init.num_gpus is {declared}, but trainer and teacher take {gpus}: Ray would never place "
            f"them; set it to {gpus}"
        )


def _replica(config: DictConfig, key: str) -> int:
    """Return the number of GPUs of one server replica."""
    size = whole(config, f"{key}.tensor_model_parallel_size") * whole(config, f"{key}.data_parallel_size")
    return size * (get(config, f"{key}.pipeline_model_parallel_size") or 1)


def batches(config: DictConfig) -> Iterator[str]:
    """A batch splits into mini-batches, ranks and micro-batches without a rest."""
    n, batch, mini = (
        whole(config, key) for key in (f"{ROLLOUT}.n", "data.train_batch_size", f"{ACTOR}.ppo_mini_batch_size")
    )
    if batch % mini:
        yield (
            f"{ACTOR}.ppo_mini_batch_size is {mini}, no divisor of data.train_batch_size={batch}: verl would fill up "
            "with made-up rows; use a divisor"
        )
    gpus, parallel = trainer_gpus(config), sequence_parallel(config)
    if gpus % parallel:
        yield (
            f"{ACTOR}.ulysses_sequence_parallel_size is {parallel}, no divisor of the {gpus} trainer GPU(s); use a "
            "divisor"
        )
        return
    ranks = gpus // parallel
    if mini * n % ranks:  # verl/workers/engine_workers.py:267
        yield (
            f"{ACTOR}.ppo_mini_batch_size={mini} x {ROLLOUT}.n={n} = {mini * n} responses do not split over {ranks} "
            f"trainer ranks; make it a multiple of {ranks}, or change the ranks (trainer.n_gpus_per_node, which in the "
            "recipes is what teacher.n_gpus leaves)"
        )
    dynamic, other = get(config, f"{ACTOR}.use_dynamic_bsz"), f"{ROLLOUT}.log_prob_use_dynamic_bsz"
    if get(config, other) != dynamic:  # verl/workers/engine_workers.py:616
        yield f"{other} is {get(config, other)}, but {ACTOR}.use_dynamic_bsz is {dynamic}: set them alike"
    if dynamic:
        return
    responses = {
        f"{ACTOR}.ppo_micro_batch_size_per_gpu": mini * n,
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": batch * n,
    }
    if get(config, f"{ACTOR}.use_kl_loss") or get(config, "algorithm.use_kl_in_reward"):
        responses[f"{REF}.log_prob_micro_batch_size_per_gpu"] = batch * n
    for key, count in responses.items():
        if count % ranks == 0 and count // ranks % whole(config, key):  # verl/workers/engine/utils.py:125
            yield (
                f"{key} is {whole(config, key)}, no divisor of the {count // ranks} responses of a rank; use a divisor"
            )
