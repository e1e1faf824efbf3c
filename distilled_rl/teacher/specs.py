"""Who the teachers of a run are, read from its ``teacher`` node: one, or several that share the problems by a data column."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from omegaconf import DictConfig, OmegaConf

from distilled_rl.config import ConfigError

# What a teacher can be, and with `several` what they can be together.
SOURCES = ("server", "url", "colocated", "temperature")
SEVERAL, NONE = "several", "none"
# The keys of every teacher's node, and those that mean something to one source.
COMMON_KEYS = ("name", "source", "allow", "eos_map", "prompt")
OWN_KEYS = {
    "server": ("model", "n_gpus", "tensor_parallel"),
    "url": ("model", "url", "timeout", "retries"),
    "colocated": ("model", "dtype", "offload"),
    "temperature": ("temperature",),
}
# What an entry of `teacher.by_key` does not say is as in the `teacher` node.
SHARED_KEYS = ("dtype", "offload", "timeout", "retries")


@dataclass(frozen=True)
class TeacherSpec:
    """One teacher.

    ``key``: the value of the data column that sends a problem to it; None for the only teacher of a run. ``where``: the
    configuration node that describes it. ``source``: server, url, colocated, or temperature. ``model``: path or hub name;
    optional for a URL. ``offload``: keep the parameters of a colocated teacher in host memory between uses.
    ``eos_map``: end-of-text id of the student -> the teacher's id that it is scored as. ``prompt``: "student", or "own": the
    teacher reads the messages through its own chat template. ``timeout``: seconds that one request to a URL may take;
    ``retries``: how often one that failed is sent again.
    """

    key: str | None
    where: str
    name: str
    source: str
    model: str | None = None
    url: str | None = None
    dtype: str | None = None
    offload: bool = True
    temperature: float | None = None
    timeout: float = 60.0
    retries: int = 4
    allow: tuple[str, ...] = ()
    eos_map: Mapping[int, int] = field(default_factory=dict)
    prompt: str = "student"

    @property
    def reads_what_the_student_wrote(self) -> bool:
        """Whether the teacher is given the very token ids of prompt and response."""
        return not self.eos_map and self.prompt == "student"

    @property
    def model_key(self) -> str:
        """The configuration key of ``model``."""
        return f"{self.where}.{'model' if self.where.startswith('teacher') else 'model_path'}"


def teacher_specs(config: DictConfig) -> tuple[TeacherSpec, ...]:
    """Return the run's teachers, none where ``teacher.source`` is none. A configuration without a ``teacher`` node has the
    served teachers of its ``distillation`` node, if that is enabled.

    Values are not checked (see :mod:`distilled_rl.checks.teachers`), but a ``by_key`` that is no mapping of nodes is a
    :class:`ConfigError`.
    """
    if OmegaConf.select(config, "teacher") is None:
        return tuple(_served_specs(config))
    return tuple(_spec(config, key, where, node) for key, where, node in teacher_nodes(config))


def teacher_nodes(config: DictConfig) -> Iterator[tuple[str | None, str, DictConfig]]:
    """Yield key, dotted place and node of each teacher that the ``teacher`` node describes. Raises :class:`ConfigError`."""
    source = OmegaConf.select(config, "teacher.source") or "server"
    if source == NONE or OmegaConf.select(config, "teacher") is None:
        return
    if source != SEVERAL:
        yield None, "teacher", config.teacher
        return
    entries = OmegaConf.select(config, "teacher.by_key", throw_on_missing=True)
    if not isinstance(entries, DictConfig) or not entries:
        raise ConfigError(
            f"teacher.by_key is {entries}, which names no teacher: give one node per value of the data column teacher.key, "
            "such as 'teacher.by_key.algebra={source: colocated, model: PATH}'"
        )
    for key in entries:
        where, node = f"teacher.by_key.{key}", entries[key]
        if not isinstance(node, DictConfig):
            raise ConfigError(f"{where} is {node!r}: give a teacher's node, such as {{source: colocated, model: PATH}}")
        yield str(key), where, node


def _served_specs(config: DictConfig) -> Iterator[TeacherSpec]:
    if not OmegaConf.select(config, "distillation.enabled"):
        return
    models = config.distillation.teacher_models
    # verl drops `teacher_model` beside others (verl/workers/config/distillation.py:310)
    names = [name for name in models if len(models) == 1 or name != "teacher_model"]
    for name in names:
        yield TeacherSpec(
            key=None if len(names) == 1 else str(models[name].key),
            where=f"distillation.teacher_models.{name}",
            name=str(models[name].model_path),
            source="server",
            model=models[name].model_path,
        )


def _spec(config: DictConfig, key: str | None, where: str, node: DictConfig) -> TeacherSpec:
    values: dict[str, Any] = dict(OmegaConf.to_container(node, resolve=True))  # type: ignore[arg-type]
    for shared in SHARED_KEYS:
        if values.get(shared) is None:
            values[shared] = OmegaConf.select(config, f"teacher.{shared}")
    values = {name: None if value == "???" else value for name, value in values.items()}
    model, allow, eos_map = values.get("model"), values.get("allow"), values.get("eos_map")
    source = str(values.get("source") or "server")
    name = values.get("name") or key or (model and str(model).rstrip("/").rpartition("/")[2]) or source
    return TeacherSpec(
        key=key,
        where=where,
        name=str(name),
        source=source,
        model=None if model is None else str(model),
        url=values.get("url"),
        dtype=values["dtype"],
        offload=TeacherSpec.offload if values["offload"] is None else values["offload"],
        temperature=values.get("temperature"),
        timeout=TeacherSpec.timeout if values["timeout"] is None else values["timeout"],
        retries=TeacherSpec.retries if values["retries"] is None else values["retries"],
        allow=tuple(allow) if isinstance(allow, list) else (),
        eos_map=eos_map if isinstance(eos_map, dict) else {},
        prompt=str(values.get("prompt") or "student"),
    )
