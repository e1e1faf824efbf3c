"""The ``distilled_rl`` node: what it accepts, and the message for what it does not."""

import dataclasses
import math

import pytest
from omegaconf import OmegaConf

from distilled_rl.config import ConfigError, DistilledRLConfig, sweep_runs


def refusal(**values):
    with pytest.raises(ConfigError) as caught:
        DistilledRLConfig.from_dict(values)
    return str(caught.value)


def test_defaults_of_each_mode():
    settings = DistilledRLConfig.from_dict({"mode": "distilled_rl"})
    assert (settings.options.eps_rho, settings.options.normalize, settings.options.apply_to) == (3.0, True, "positive")
    assert (settings.reproducible, settings.seed, settings.dump_steps) == (False, 1, ())
    assert DistilledRLConfig.from_dict({"mode": "opd"}).options.teacher_coef == 1.0
    assert DistilledRLConfig.from_dict({"mode": "opd_rl"}).options.teacher_coef == 1.0
    needs = {mode: DistilledRLConfig.from_dict({"mode": mode}).needs_teacher for mode in ("grpo", "opd", "opd_rl")}
    assert needs == {"grpo": False, "opd": True, "opd_rl": True}


def test_whole_numbers_count_as_floats():
    assert DistilledRLConfig.from_dict({"mode": "distilled_rl", "eps_rho": 3}).options.eps_rho == 3.0


def test_is_frozen():
    settings = DistilledRLConfig.from_dict({"mode": "grpo"})
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.mode = "opd"  # type: ignore[misc]


def test_read_from_a_run_with_interpolations():
    config = OmegaConf.create({"seed": 7, "distilled_rl": {"mode": "opd", "seed": "${seed}", "teacher_coef": 0.5}})
    settings = DistilledRLConfig.from_config(config)
    assert (settings.mode, settings.seed, settings.options.teacher_coef) == ("opd", 7, 0.5)


def test_node_missing():
    with pytest.raises(ConfigError, match="no 'distilled_rl' node: start from one of the recipes"):
        DistilledRLConfig.from_config(OmegaConf.create({"trainer": {}}))


def test_mode_missing():
    assert "distilled_rl.mode is missing: name the method" in refusal(eps_rho=3.0)


def test_mode_unknown():
    message = refusal(mode="ppo")
    assert "unknown mode 'ppo': distilled_rl.mode must be one of" in message
    assert all(mode in message for mode in ("grpo", "opd", "opd_rl", "distilled_rl"))


def test_key_unknown_names_the_nearest():
    message = refusal(mode="distilled_rl", eps_roh=3.0)
    assert "unknown key distilled_rl.eps_roh" in message and "did you mean distilled_rl.eps_rho?" in message


def test_key_of_another_mode():
    assert "unknown key distilled_rl.eps_rho in mode 'grpo'" in refusal(mode="grpo", eps_rho=3.0)


@pytest.mark.parametrize("eps_rho", [0.99, 0.0, -3.0, math.inf, math.nan])
def test_eps_rho_below_one_or_not_finite(eps_rho):
    message = refusal(mode="distilled_rl", eps_rho=eps_rho)
    assert f"distilled_rl.eps_rho is {eps_rho}" in message and "must be a finite number >= 1" in message


def test_apply_to_unknown():
    message = refusal(mode="distilled_rl", apply_to="some")
    assert "distilled_rl.apply_to is 'some': must be one of positive, negative, all" in message


def test_teacher_coef_out_of_range():
    assert "distilled_rl.teacher_coef is 0.0" in refusal(mode="opd", teacher_coef=0.0)
    assert "distilled_rl.teacher_coef is -0.1: lambda must be" in refusal(mode="opd_rl", teacher_coef=-0.1)
    assert DistilledRLConfig.from_dict({"mode": "opd_rl", "teacher_coef": 0.0}).options.teacher_coef == 0.0


@pytest.mark.parametrize(
    ("key", "value", "kind"),
    [
        ("eps_rho", "three", "float"),
        ("eps_rho", True, "float"),
        ("normalize", "yes", "bool"),
        ("normalize", 1, "bool"),
        ("apply_to", 3, "str"),
        ("reproducible", "true", "bool"),
        ("seed", 1.5, "int"),
        ("poll_interval", None, "float"),
        ("dump_steps", [1, "2"], "tuple"),
        ("dump_steps", 3, "tuple"),
    ],
)
def test_wrong_type(key, value, kind):
    message = refusal(mode="distilled_rl", **{key: value})
    assert f"distilled_rl.{key} is {value!r}: expected" in message and kind in message


def test_poll_interval_not_positive():
    assert "distilled_rl.poll_interval is 0.0: must be a number of seconds > 0" in refusal(mode="grpo", poll_interval=0)


def test_dump_steps_without_a_place():
    assert "distilled_rl.dump_steps is set but distilled_rl.dump_dir is not" in refusal(mode="grpo", dump_steps=[1])
    settings = DistilledRLConfig.from_dict({"mode": "grpo", "dump_steps": [1, 3], "dump_dir": "dumps"})
    assert settings.dump_steps == (1, 3)


def sweep(*runs):
    config = {"distilled_rl": {"mode": "grpo", "reproducible": True}, "sweep": {"runs": list(runs)}}
    return OmegaConf.create(config | {"student": {"name": "s"}, "teacher": {"name": "t"}, "run": {"output": "outputs"}})


def test_sweep_runs_share_the_common_keys():
    runs = sweep_runs(sweep({"mode": "grpo", "seed": 2}, {"mode": "opd_rl", "seed": 3, "teacher_coef": 0.3}))
    assert [run.name for run in runs] == ["s-grpo-none-seed2", "s-opd_rl-t-seed3"]
    assert all(run.settings.reproducible for run in runs)
    assert runs[1].settings.options.teacher_coef == 0.3


def test_sweep_refuses_a_bad_run_by_position():
    with pytest.raises(ConfigError, match=r"sweep.runs\[1\]: unknown key distilled_rl.eps_rho in mode 'opd'"):
        sweep_runs(sweep({"mode": "grpo"}, {"mode": "opd", "eps_rho": 3.0}))
    with pytest.raises(ConfigError, match=r"sweep.runs\[1\]: a second run is called 's-grpo-none-seed1'"):
        sweep_runs(sweep({"mode": "grpo"}, {"mode": "grpo"}))
    with pytest.raises(ConfigError, match=r"a sweep needs sweep\.runs"):
        sweep_runs(sweep())
