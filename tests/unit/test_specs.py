"""Who the teachers of a run are, read from its configuration."""

import pytest
from omegaconf import OmegaConf

from distilled_rl.config import ConfigError
from distilled_rl.teacher.specs import TeacherSpec, teacher_specs

MODELS = {"teacher_model": {"key": None, "model_path": "/default"}}


def specs(teacher=None, **others):
    return teacher_specs(OmegaConf.create({} if teacher is None else {"teacher": teacher} | others))


def test_no_teacher():
    assert specs() == specs({"source": "none", "model": "/m"}) == ()
    assert teacher_specs(OmegaConf.create({"distillation": {"enabled": False, "teacher_models": MODELS}})) == ()


def test_one_teacher_of_each_source():
    assert specs({"model": "/models/m/"}) == (TeacherSpec(None, "teacher", "m", "server", model="/models/m/"),)
    (spec,) = specs({"source": "colocated", "model": "/m", "name": "x", "dtype": "fp32", "offload": False})
    assert (spec.name, spec.source, spec.dtype, spec.offload) == ("x", "colocated", "fp32", False)
    (spec,) = specs({"source": "url", "url": "http://x", "timeout": 5, "retries": 0, "model": None})
    assert (spec.name, spec.model, spec.url, spec.timeout, spec.retries) == ("url", None, "http://x", 5, 0)
    (spec,) = specs({"source": "temperature", "temperature": 0.6})
    assert (spec.name, spec.temperature) == ("temperature", 0.6)


def test_defaults():
    (spec,) = specs(
        {"source": "url", "url": "http://x", "timeout": None, "eos_map": None, "allow": None, "prompt": None}
    )
    assert (spec.timeout, spec.retries, spec.offload) == (60.0, 4, True)
    assert (spec.allow, spec.eos_map, spec.prompt) == ((), {}, "student")
    assert spec.reads_what_the_student_wrote


@pytest.mark.parametrize("choice", [{"eos_map": {1: 2}}, {"prompt": "own"}])
def test_another_text_than_the_students(choice):
    (spec,) = specs({"model": "/m", **choice})
    assert not spec.reads_what_the_student_wrote


def test_several_teachers_share_what_they_do_not_say():
    by_key = {
        "algebra": {"source": "colocated", "model": "/a"},
        3: {"source": "colocated", "model": "/b", "dtype": "fp32", "offload": True, "name": "logic"},
        "x/y.z": {"source": "url", "url": "http://x", "eos_map": {1: 2}, "allow": ["eos"], "prompt": "own"},
    }
    shared = {"dtype": "bf16", "offload": False, "timeout": 5, "retries": 1, "eos_map": {8: 9}}
    algebra, logic, other = specs({"source": "several", "by_key": by_key, **shared})
    assert (algebra.key, algebra.where, algebra.name) == ("algebra", "teacher.by_key.algebra", "algebra")
    assert (algebra.dtype, algebra.offload, algebra.eos_map) == ("bf16", False, {})
    assert (logic.key, logic.name, logic.dtype, logic.offload) == ("3", "logic", "fp32", True)
    assert (other.key, other.timeout, other.retries) == ("x/y.z", 5, 1)
    assert (other.eos_map, other.allow, other.prompt) == ({1: 2}, ("eos",), "own")
    assert algebra.model_key == "teacher.by_key.algebra.model"


@pytest.mark.parametrize(
    ("by_key", "needle"),
    [
        ({}, "names no teacher"),
        (None, "names no teacher"),
        ([1], "names no teacher"),
        ({"a": 3}, "teacher.by_key.a is 3"),
    ],
)
def test_entries_that_are_none(by_key, needle):
    with pytest.raises(ConfigError, match=needle):
        specs({"source": "several", "by_key": by_key})


def test_values_of_the_wrong_kind_are_left_to_the_checks():
    (spec,) = specs({"source": "colocated", "allow": "eos", "eos_map": 3, "offload": "yes", "model": "???"})
    assert (spec.allow, spec.eos_map, spec.offload, spec.model) == ((), {}, "yes", None)


def test_verls_own_configuration_without_a_teacher_node():
    config = OmegaConf.create({"distillation": {"enabled": True, "teacher_models": MODELS}})
    (spec,) = teacher_specs(config)
    assert (spec.key, spec.source, spec.model) == (None, "server", "/default")
    assert spec.model_key == "distillation.teacher_models.teacher_model.model_path"
    for name in ("a", "b"):
        config.distillation.teacher_models[name] = {"key": f"key-{name}", "model_path": f"/{name}"}
    assert [(spec.key, spec.model) for spec in teacher_specs(config)] == [("key-a", "/a"), ("key-b", "/b")]
