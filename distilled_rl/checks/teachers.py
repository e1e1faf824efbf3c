"""Rules on teachers: what each one's node says, which rows go to which, and whether they can score the student."""

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig

from distilled_rl.checks import files
from distilled_rl.checks.values import (
    ACTOR,
    ROLLOUT,
    Remark,
    data_files,
    get,
    is_remote,
    real,
    student,
    teachers,
    whole,
)
from distilled_rl.config import ConfigError
from distilled_rl.recipe import nearest
from distilled_rl.teacher import compatibility
from distilled_rl.teacher.model_files import read_model
from distilled_rl.teacher.specs import (
    COMMON_KEYS,
    NONE,
    OWN_KEYS,
    SEVERAL,
    SOURCES,
    TeacherSpec,
    teacher_nodes,
    teacher_specs,
)
from distilled_rl.teacher.verdicts import Verdict

DTYPES = ("fp32", "bf16")
STRATEGIES = ("fsdp", "fsdp2")
SHOWN = 5  # values in a message


def nodes(config: DictConfig) -> Iterator[str]:
    """Each teacher's node holds what its source needs."""
    if get(config, "teacher.by_key") and (source := get(config, "teacher.source")) != SEVERAL:
        yield f"teacher.by_key is given, but teacher.source is {source}: add teacher=several, or drop it"
    specs = {spec.key: spec for spec in teacher_specs(config)}
    for key, where, node in teacher_nodes(config):
        spec = specs[key]
        if spec.source not in SOURCES:
            known = SOURCES if key is not None else (*SOURCES, SEVERAL, NONE)
            yield f"{where}.source is {spec.source!r}: must be one of {', '.join(known)}"
            continue
        if key is not None:
            yield from _unknown_keys(spec, node)
        for name in OWN_KEYS[spec.source]:
            get(node, name)  # ends the rule where it is ???
        if spec.source in ("server", "colocated") and spec.model is None:
            yield f"{spec.model_key} is null: set {spec.model_key}=PATH"
        yield from _OF_SOURCE[spec.source](config, spec)
        yield from _choices(spec, node)


def _unknown_keys(spec: TeacherSpec, node: DictConfig) -> Iterator[str]:
    """Yield the keys of an entry that mean nothing to its source."""
    known = (*COMMON_KEYS, *OWN_KEYS[spec.source])
    for key in map(str, node):
        if key not in known:
            near = nearest(key, known)
            yield (
                f"{spec.where}.{key} means nothing to a teacher with source {spec.source}"
                + (f": did you mean {near}?" if near else "")
                + f" (known: {', '.join(known)})"
            )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _server(_config: DictConfig, _spec: TeacherSpec) -> Iterator[str]:
    yield from ()


def _url(_config: DictConfig, spec: TeacherSpec) -> Iterator[str]:
    if not _is_number(spec.timeout) or not spec.timeout > 0:
        yield f"{spec.where}.timeout is {spec.timeout!r}: must be a number of seconds > 0"
    if not isinstance(spec.retries, int) or isinstance(spec.retries, bool) or spec.retries < 0:
        yield f"{spec.where}.retries is {spec.retries!r}: must be a whole number >= 0"


def _colocated(config: DictConfig, spec: TeacherSpec) -> Iterator[str]:
    if spec.dtype not in DTYPES:
        yield f"{spec.where}.dtype is {spec.dtype!r}: must be one of {', '.join(DTYPES)}"
    if not isinstance(spec.offload, bool):
        yield f"{spec.where}.offload is {spec.offload!r}: must be true or false"
    elif not spec.offload:
        yield (
            f"{spec.where}.offload is false: the forward-only engine of verl 0.9.1 always keeps its parameters in host memory "
            "between uses; leave it true"
        )
    strategy = get(config, f"{ACTOR}.strategy")
    if strategy not in STRATEGIES:
        yield (
            f"{ACTOR}.strategy is {strategy!r}: the colocated teacher {spec.name} needs {' or '.join(STRATEGIES)}; use a "
            "served one"
        )


def _temperature(config: DictConfig, spec: TeacherSpec) -> Iterator[str]:
    """The student at another temperature than the one it samples at; it reads and writes its own tokens."""
    key, value, sampled = f"{spec.where}.temperature", spec.temperature, real(config, f"{ROLLOUT}.temperature")
    if value is None or not _is_number(value):
        yield f"{key} is {value!r}: must be a number"
    elif not value > 0:
        yield f"{key} is {value}: must be > 0"
    elif value == sampled:
        yield (
            f"{key} is {value}, as {ROLLOUT}.temperature: the teacher would be the student itself and change nothing; use "
            "another one"
        )
    if spec.prompt != "student":
        yield f"{spec.where}.prompt is {spec.prompt}, but this teacher is the student itself: set it to student"
    if spec.eos_map:
        yield (
            f"{spec.where}.eos_map is {spec.eos_map}, but this teacher is the student itself and ends a text as it does: "
            "set it to {}"
        )


_OF_SOURCE = {"server": _server, "url": _url, "colocated": _colocated, "temperature": _temperature}


def _choices(spec: TeacherSpec, node: DictConfig) -> Iterator[str]:
    """``allow``, ``eos_map`` and ``prompt`` are choices that exist: see :func:`compatibility.compare`."""
    where, allow, eos_map = spec.where, get(node, "allow"), get(node, "eos_map")
    if not isinstance(allow, ListConfig | None):
        yield f"{where}.allow is {allow!r}: give a list of names, such as {where}.allow=[eos]"
    if not isinstance(eos_map, DictConfig | None):
        yield f"{where}.eos_map is {eos_map!r}: give the student's id and the teacher's, {{151643: 151645}}"
    yield from _impossible_choices(spec)
    if spec.prompt == "own" and spec.source == "url":
        if spec.model is None:
            yield (
                f"{where}.prompt is own, but {spec.model_key} is null: the teacher's chat template is read from the files "
                f"of its tokenizer; set {spec.model_key}=PATH"
            )
            return
        try:
            files.model_folder(spec.model)
        except ConfigError as error:
            yield f"{where}.prompt is own, which needs the files of the teacher's tokenizer: {spec.model_key}: {error}"


def _impossible_choices(spec: TeacherSpec) -> Iterator[str]:
    pairs = [number for pair in spec.eos_map.items() for number in pair]
    if not all(isinstance(number, int) and not isinstance(number, bool) for number in pairs):
        yield f"{spec.where}.eos_map is {spec.eos_map}: it maps token ids to token ids, such as {{151643: 151645}}"
    try:
        compatibility.check_choices(spec.allow, spec.prompt)
    except ConfigError as error:
        yield str(error) if spec.key is None else f"{spec.where}: {error}"


def pool(config: DictConfig) -> Iterator[str]:
    """verl serves the teachers that the ``teacher`` node names."""
    served = sorted(str(get(config, f"{key}.model_path")) for key in teachers(config))
    named = sorted(str(spec.model) for spec in teacher_specs(config) if spec.source == "server")
    if served and named and served != named:
        yield (
            f"distillation.teacher_models would serve {', '.join(served)}, but the teacher node names {', '.join(named)}: "
            "name teachers there only (teacher.model=PATH for one, teacher=several for more)"
        )


def routing(config: DictConfig) -> Iterator[str]:
    """Each training row has a teacher, each teacher has rows, and no two are called the same. (Validation asks no teacher.)"""
    if get(config, "teacher.source") != SEVERAL:
        return
    specs = teacher_specs(config)
    for name, count in Counter(spec.name for spec in specs).items():
        if count > 1:
            both = " and ".join(spec.where for spec in specs if spec.name == name)
            yield f"{both} are both called {name!r}, but metrics go by name: give each a name of its own"
    column = get(config, "teacher.key")
    if not isinstance(column, str) or not column:
        yield f"teacher.key is {column!r}: name the data column that chooses the teacher, such as teacher.key=data_source"
        return
    counts: Counter[str] = Counter()
    for file in data_files(config, "data.train_files"):
        if is_remote(file):
            yield Remark(f"data.train_files: {file} is remote, so its column {column} (teacher.key) was not looked at")
            return
        try:
            names = files.read_table(Path(file))[1].names
        except ConfigError:
            return  # another rule's to name
        if column not in names:
            yield f"teacher.key is {column!r}, but {file} has no such column; it has {', '.join(names)}"
            return
        counts += files.value_counts(Path(file), column)
    known = [str(spec.key) for spec in specs]
    if strange := [(value, count) for value, count in counts.most_common() if value not in known]:
        listed = ", ".join(f"{value!r} ({count} rows)" for value, count in strange[:SHOWN])
        more = f" and {len(strange) - SHOWN} more values" if len(strange) > SHOWN else ""
        yield (
            f"the column {column} (teacher.key) of data.train_files holds {listed}{more}, for which there is no teacher; "
            f"teacher.by_key knows {', '.join(known)}: add a teacher, or leave those rows out"
        )
    for spec in specs:
        if counts and spec.key not in counts:
            yield Remark(
                f"{spec.where}: no row of data.train_files has {spec.key!r} in the column {column}, so this teacher is "
                "loaded and never asked"
            )


def comparison(config: DictConfig) -> Iterator[str]:
    """The teachers that this run loads can score the student's tokens; a Remark where the files to tell are not here."""
    for spec in teacher_specs(config):
        if spec.source not in ("server", "colocated") or spec.model is None:
            continue
        try:
            folders = files.readable(spec.model, spec.model)
        except ConfigError:
            continue  # another rule's to name
        yield from _incompatibilities(config, spec, folders and folders[0], spec.model_key)


def urls(config: DictConfig) -> Iterator[str]:
    """Each server behind a URL answers, serves the teacher, reads the longest sequence, and can score the student's tokens."""
    specs = [spec for spec in teacher_specs(config) if spec.source == "url"]
    if not specs:
        return
    from distilled_rl.teacher.url import probe  # imports torch

    for spec in specs:
        try:
            served = probe(spec)
        except ConfigError as error:
            yield str(error)
            continue
        key, offered = f"{spec.where}.url", [name for name in (served.root, served.id) if name]
        if spec.model is not None and _last(spec.model) not in map(_last, offered):
            yield (
                f"{spec.model_key} is {spec.model}, but the server at {spec.url} serves {served.id}"
                + (f" (from {served.root})" if served.root not in (None, served.id) else "")
                + f": correct {key} or {spec.model_key}"
            )
            continue
        prompt, response = whole(config, "data.max_prompt_length"), whole(config, "data.max_response_length")
        needed = prompt + response + 1
        if served.max_model_len is not None and served.max_model_len < needed:
            yield (
                f"{key}: the server's max_model_len is {served.max_model_len}, but data.max_prompt_length={prompt} + "
                f"data.max_response_length={response} + 1 generated token = {needed}: start it with --max-model-len "
                f"{needed}, or shorten the lengths"
            )
        folders = (_small_files(name) for name in (spec.model, *offered) if name)
        yield from _incompatibilities(config, spec, next(filter(None, folders), None), key)


def _last(name: str) -> str:
    """Return the last part of a path or hub name: the same model may lie elsewhere on the server's machine."""
    return name.rstrip("/").rpartition("/")[2]


def _small_files(name: str) -> Path | None:
    """Return the folder of a model that runs elsewhere, None where its configuration and tokenizer are not here."""
    try:
        folders = files.readable(name, name, weights=False)
    except ConfigError:
        return None
    here = folders is not None and all((folders[0] / file).is_file() for file in ("config.json", "tokenizer.json"))
    return folders[0] if folders is not None and here else None


def _incompatibilities(config: DictConfig, spec: TeacherSpec, teacher: Path | None, key: str) -> Iterator[str]:
    """Yield why a teacher cannot score the student. ``teacher``: its folder, None where it cannot be looked at.

    Lengths are left to :func:`distilled_rl.checks.sizes.lengths`, which knows the servers' limits too.
    """
    ours = student(config)
    try:
        folders = files.readable(ours.path, ours.tokenizer) if ours is not None else None
    except ConfigError:
        return  # another rule's to name
    if folders is None or teacher is None:
        who = "student's" if folders is None else "teacher's"
        yield Remark(
            f"{key}: the teacher {spec.name} was not compared with the student, as the {who} configuration and tokenizer "
            "are not on this machine: distilled-rl check-teacher STUDENT TEACHER downloads those of a hub model and compares"
            + (f", or set {spec.model_key} to a folder with them" if spec.source == "url" else "")
        )
        return
    if any(_impossible_choices(spec)):
        return  # another rule's to name
    try:
        report = compatibility.compare(
            folders[0],
            teacher,
            student_tokenizer=folders[1],
            allow=spec.allow,
            eos_map=spec.eos_map,
            prompt=spec.prompt,
        )
    except ConfigError as error:
        yield f"{key}: {error}"
        return
    for line in report.refused:
        yield f"{key}: {line.found}; {line.advice}"
    if spec.prompt == "own" and report["template"].verdict is Verdict.SAME and read_model(teacher).template is None:
        yield f"{spec.where}.prompt is own, but {teacher} has no chat template: copy one to it, or set it to student"
