"""Rules on what a run reads: data files and model folders."""

from collections.abc import Iterator
from pathlib import Path

from omegaconf import DictConfig

from distilled_rl.checks import files
from distilled_rl.checks.values import data_files, get, teacher_choices, total_steps, whole
from distilled_rl.checks.values import models as models_of
from distilled_rl.config import ConfigError
from distilled_rl.teacher import compatibility
from distilled_rl.teacher.model_files import model_config

# vllm/v1/attention/backends/cpu_attn.py:59
CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)


def data(config: DictConfig) -> Iterator[str]:
    """Training and validation files exist, hold verl's columns, and the training rows fill a batch in every epoch."""
    prompt_key, source_key = get(config, "data.prompt_key"), get(config, "data.reward_fn_key")
    for key in ("data.train_files", "data.val_files"):
        for path in data_files(config, key):
            if _is_remote(path):
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
        if _is_remote(path):
            return None
        try:
            rows += files.read_table(Path(path))[0]
        except ConfigError:
            return None
    limit = get(config, f"data.{split}_max_samples") or -1
    return min(rows, limit) if limit > 0 else rows


def _is_remote(path: str) -> bool:
    """Whether verl downloads the file, so that it cannot be looked at here."""
    return "://" in path


def models(config: DictConfig) -> Iterator[str]:
    """Student and teachers exist and are whole, the machine can run them, and the teachers can score the student."""
    whole_models: list[tuple[str, Path, Path] | None] = []
    for key, path, tokenizer_path in models_of(config):
        whole_models.append(None)
        try:
            folder, tokenizer = files.model_folder(path), files.model_folder(tokenizer_path)
            model = model_config(folder) if folder is not None else {}
        except ConfigError as error:
            yield f"{key}: {error}"
            continue
        if folder is None or tokenizer is None:
            continue
        is_whole = files.small_files_are_there(path, folder) and files.small_files_are_there(tokenizer_path, tokenizer)
        if files.hub_is_offline() or Path(path).expanduser().is_dir():
            for problem in files.folder_problems(folder, tokenizer):
                is_whole = False
                yield f"{key}: {problem}"
        size = files.head_dim(model)
        if get(config, "trainer.device") == "cpu" and size is not None and size not in CPU_HEAD_DIMS:
            yield (
                f"{key}: {path} has attention heads of size {size}: on trainer.device=cpu vLLM computes attention for "
                f"head_dim {', '.join(map(str, CPU_HEAD_DIMS))} only; use another model, or a GPU"
            )
        if is_whole:
            whole_models[-1] = key, folder, tokenizer
    if whole_models and (student := whole_models[0]):
        for teacher in filter(None, whole_models[1:]):
            yield from _incompatibilities(config, student, teacher)


def _incompatibilities(
    config: DictConfig, student: tuple[str, Path, Path], teacher: tuple[str, Path, Path]
) -> Iterator[str]:
    """Yield why a teacher cannot score the student. Each is a key, a model folder, and the folder of its tokenizer.

    Lengths are left to :func:`distilled_rl.checks.sizes.lengths`, which knows the servers' limits too.
    """
    allow, eos_map, prompt = teacher_choices(config)
    try:
        report = compatibility.compare(
            student[1], teacher[1], student_tokenizer=student[2], allow=allow, eos_map=eos_map, prompt=prompt
        )
    except ConfigError as error:
        yield f"{teacher[0]}: {error}"
        return
    for line in report.refused:
        yield f"{teacher[0]}: {line.found}; {line.advice}"
