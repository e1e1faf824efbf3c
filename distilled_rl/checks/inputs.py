"""Rules on what a run reads: data files and model folders."""

from collections.abc import Iterator
from pathlib import Path

from omegaconf import DictConfig

from distilled_rl.checks import files
from distilled_rl.checks.values import Model, data_files, get, is_remote, student, total_steps, whole
from distilled_rl.config import ConfigError
from distilled_rl.teacher.model_files import model_config
from distilled_rl.teacher.specs import teacher_specs

# vllm/v1/attention/backends/cpu_attn.py:59
CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)


def data(config: DictConfig) -> Iterator[str]:
    """Training and validation files exist, hold verl's columns, and the training rows fill a batch in every epoch."""
    prompt_key, source_key = get(config, "data.prompt_key"), get(config, "data.reward_fn_key")
    for key in ("data.train_files", "data.val_files"):
        for path in data_files(config, key):
            if is_remote(path):
                continue
            try:
                rows, schema = files.read_table(Path(path))
            except ConfigError as error:
                yield f"{key}: {error}"
                continue
            if rows == 0:
                yield f"{key}: {path} has 0 rows: write it again, or leave it out"
                continue
            for problem in files.column_problems(Path(path), schema, prompt_key, source_key):
                yield f"{key}: {problem}"
    batch, epochs = whole(config, "data.train_batch_size"), whole(config, "trainer.total_epochs")
    rows = data_rows(config, "train")
    if not rows:
        return
    if rows < batch:
        yield (
            f"data.train_batch_size is {batch}, but data.train_files has {rows} rows: verl drops the incomplete batch "
            "and has nothing to train on; lower it, or add data"
        )
    elif rows // batch * epochs < (steps := total_steps(config) or 0):
        yield (
            f"trainer.total_epochs is {epochs}: {rows} rows in batches of {batch} end after {rows // batch * epochs} "
            f"steps, short of trainer.total_training_steps={steps}; raise total_epochs"
        )


def data_rows(config: DictConfig, split: str) -> int | None:
    """Return the rows of ``data.<split>_files``, before verl drops overlong prompts; None where they are not known."""
    rows = 0
    for path in data_files(config, f"data.{split}_files"):
        if is_remote(path):
            return None
        try:
            rows += files.read_table(Path(path))[0]
        except ConfigError:
            return None
    limit = get(config, f"data.{split}_max_samples") or -1
    return min(rows, limit) if limit > 0 else rows


def models(config: DictConfig) -> Iterator[str]:
    """The student, and the teachers that this run loads, exist and are whole, and the machine can run them."""
    ours = student(config)
    loaded = [(ours, True)] if ours is not None else []
    loaded += [
        (Model(spec.model_key, spec.model, spec.model), spec.source == "server")
        for spec in teacher_specs(config)
        if spec.source in ("server", "colocated") and spec.model is not None
    ]
    for model, by_vllm in loaded:
        yield from _model_problems(config, model, by_vllm)


def _model_problems(config: DictConfig, model: Model, by_vllm: bool) -> Iterator[str]:
    key, path, _ = model
    try:
        folder, tokenizer = files.model_folder(path), files.model_folder(model.tokenizer)
        values = model_config(folder) if folder is not None else {}
    except ConfigError as error:
        yield f"{key}: {error}"
        return
    if folder is None or tokenizer is None:
        return
    if files.hub_is_offline() or Path(path).expanduser().is_dir():
        for problem in files.folder_problems(folder, tokenizer):
            yield f"{key}: {problem}"
    size = files.head_dim(values)
    if by_vllm and get(config, "trainer.device") == "cpu" and size is not None and size not in CPU_HEAD_DIMS:
        yield (
            f"{key}: {path} has attention heads of size {size}: on trainer.device=cpu vLLM computes attention for "
            f"head_dim {', '.join(map(str, CPU_HEAD_DIMS))} only; use another model, or a GPU"
        )
