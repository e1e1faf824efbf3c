"""Build the whole miniature into one folder: data, student, teachers. Deterministic, and cached part by part.

    OUT/data/{train,test,val}.parquet   2000 RL problems, 1000 held-out ones, the first 200 of those
    OUT/tokenizer/
    OUT/models/student/                 a Hugging Face checkpoint with its tokenizer
    OUT/models/teacher-NAME/            the same, for each teacher asked for

Each part holds a `part.json` with the hash of everything that went into it and, for a model, its measured figures. A
part is written to a temporary folder and renamed when it is whole: one that exists under its name is complete.
"""

import fcntl
import hashlib
import json
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow
import pyarrow.parquet
import tokenizers
import torch
import transformers

from distilled_rl.miniature import generate, models, recipes, sft, task
from distilled_rl.miniature.tokenizer import save_tokenizer
from distilled_rl.processes import die_with_parent

Log = Callable[[str], None]

VALIDATION_PROBLEMS = 200
MANIFEST = "part.json"
_SOURCES = ("task.py", "tokenizer.py", "models.py", "sft.py", "generate.py")


@dataclass(frozen=True)
class Miniature:
    """Where the built parts lie, and each model's held-out figures by name (`student`, `clean`, ...)."""

    root: Path
    figures: dict[str, dict[str, float]]

    @property
    def student(self) -> Path:
        return self.root / "models" / "student"

    def teacher(self, name: str) -> Path:
        """The folder of teacher `name`."""
        return self.root / "models" / f"teacher-{name}"

    def data(self, split: str) -> Path:
        """The parquet file of `split`: `train`, `test` or `val`."""
        return self.root / "data" / f"{split}.parquet"


def say(line: str) -> None:
    """Print a line at once; the log of a build, also from its worker processes."""
    print(line, flush=True)


def build(
    out_dir: Path | str,
    teachers: Sequence[str] = ("clean",),
    force: bool = False,
    workers: int = 2,
    log: Log = say,
) -> Miniature:
    """Build data, tokenizer, student and `teachers` (keys of `recipes.TEACHERS`) into `out_dir`.

    A part whose settings, sources and library versions are unchanged is kept, unless `force`. Up to `workers` models
    are made side by side, each in a process of its own with one thread, so that the weights do not depend on the number
    of cores; then `log` has to be a function that a process can be handed. Two builds into one folder take turns.
    ValueError on an unknown teacher.
    """
    unknown = sorted(set(teachers) - set(recipes.TEACHERS))
    if unknown:
        raise ValueError(f"unknown teachers {unknown}: choose among {sorted(recipes.TEACHERS)}")
    root = Path(out_dir)
    root.mkdir(parents=True, exist_ok=True)
    made = Miniature(root, figures={})
    plan = {"student": (made.student, recipes.STUDENT)}
    plan |= {name: (made.teacher(name), recipes.TEACHERS[name]) for name in teachers}
    with _exclusive(root):
        _part(root / "data", _key("data"), force, log, _write_data)
        _part(root / "tokenizer", _key("tokenizer"), force, log, _write_tokenizer)
        jobs = {name: (folder, recipe, force, log) for name, (folder, recipe) in plan.items()}
        made.figures.update(_side_by_side(jobs, workers))
    for name, values in made.figures.items():
        log(f"{name:8} " + "  ".join(f"{key} {value:g}" for key, value in values.items()))
    return made


def _side_by_side(jobs: dict[str, tuple], workers: int) -> dict[str, dict[str, float]]:
    """Run `_build_model` on each job's arguments; the figures by name. One worker means this very process."""
    if workers == 1 or len(jobs) == 1:
        return {name: _build_model(*job) for name, job in jobs.items()}
    count, context = min(workers, len(jobs)), multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(count, mp_context=context, initializer=die_with_parent) as pool:
        futures = {name: pool.submit(_build_model, *job) for name, job in jobs.items()}
        return {name: future.result() for name, future in futures.items()}


def _build_model(folder: Path, recipe: recipes.Recipe, force: bool, log: Log) -> dict[str, float]:
    transformers.utils.logging.disable_progress_bar()
    with _one_thread():
        return _part(folder, _key("model", recipe), force, log, _model_writer(folder.name, recipe, log))["figures"]


# ---- parts: each writer fills an empty folder and returns the figures to keep ----

Writer = Callable[[Path], dict[str, float]]


def _write_data(folder: Path) -> dict[str, float]:
    held_out = task.held_out_problems()
    splits = {"train": task.rl_problems(), "test": held_out, "val": held_out[:VALIDATION_PROBLEMS]}
    for split, problems in splits.items():
        rows = [task.verl_row(problem, index, split) for index, problem in enumerate(problems)]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"{split}.parquet")
    return {split: len(problems) for split, problems in splits.items()}


def _write_tokenizer(folder: Path) -> dict[str, float]:
    save_tokenizer(folder)
    return {}


def _model_writer(name: str, recipe: recipes.Recipe, log: Log) -> Writer:
    def write(folder: Path) -> dict[str, float]:
        """Train the model into ``folder`` and return its held-out figures."""
        model = sft.train(recipe.size, recipe.textbook, recipe.sft, log=lambda line: log(f"{name}: {line}"))
        models.save_model(model, folder)
        result = generate.evaluate(folder, task.held_out_problems())
        if result.greedy is None:
            raise AssertionError("a greedy evaluation was asked for")
        return {
            "parameters": models.SIZES[recipe.size].parameters,
            "greedy": round(result.greedy, 4),
            "pass_at_1": round(result.pass_at_1, 4),
            "wrong_step": round(result.wrong_step, 4),
            "ended": round(result.ended, 4),
        }

    return write


# ---- the cache ----


def _key(kind: str, recipe: recipes.Recipe | None = None) -> str:
    """A hash of all that decides what a part contains."""
    sources = [hashlib.sha256((Path(__file__).parent / name).read_bytes()).hexdigest() for name in _SOURCES]
    versions = [torch.__version__, transformers.__version__, tokenizers.__version__]
    settings = _plain(asdict(recipe)) if recipe else None
    everything = json.dumps([kind, settings, sources, versions], sort_keys=True)
    return hashlib.sha256(everything.encode()).hexdigest()


def _plain(value: object) -> object:
    """`value` with the tuple keys of its dictionaries spelt out, as JSON wants them."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return value


def _part(folder: Path, key: str, force: bool, log: Log, write: Writer) -> dict:
    """The manifest of the part in `folder`, written anew unless it is there with this `key`."""
    name = folder.name
    manifest = folder / MANIFEST
    if not force and manifest.exists():
        kept = json.loads(manifest.read_text())
        if kept["key"] == key:
            log(f"{name}: kept")
            return kept
    log(f"{name}: building")
    started = time.monotonic()
    folder.parent.mkdir(parents=True, exist_ok=True)
    for leftover in folder.parent.glob(f".{name}.*"):
        shutil.rmtree(leftover)
    # by process: a worker that outlives a killed build must not rename what its successor is writing
    half_written, outdated = (folder.parent / f".{name}.{os.getpid()}.{end}" for end in ("part", "old"))
    half_written.mkdir()
    made = {"key": key, "figures": write(half_written)}
    (half_written / MANIFEST).write_text(json.dumps(made, indent=1) + "\n")
    if folder.exists():
        os.replace(folder, outdated)
    os.replace(half_written, folder)
    if outdated.exists():
        shutil.rmtree(outdated)
    log(f"{name}: done in {time.monotonic() - started:.0f} s")
    return made


@contextmanager
def _exclusive(root: Path) -> Iterator[None]:
    """Hold the folder's lock, waiting for another build to finish; the system frees it if the process dies."""
    with open(root / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
