"""Recipes compose, hold the paper's numbers, and answer an override that does not fit with one that does."""

import functools

import pytest
from omegaconf import OmegaConf

from distilled_rl.config import ConfigError, DistilledRLConfig
from distilled_rl.recipe import RECIPES, compose, find_recipe, flatten, nearest

MODES = ("grpo", "opd", "opd_rl", "distilled_rl")
SCALES = ("cpu", "1n8g")
OTHERWISE = ("loss=authors_code", "seed=5", "~trainer.val_before_train")
composed = functools.cache(compose)


def refusal(recipe, *overrides):
    with pytest.raises(ConfigError) as caught:
        compose(recipe, overrides)
    return str(caught.value)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("mode", MODES)
def test_every_recipe_composes_at_every_scale(mode, scale):
    config = composed(mode, (f"scale={scale}",))
    settings = DistilledRLConfig.from_config(config)
    assert settings.mode == mode
    assert config.distillation.enabled == settings.needs_teacher
    assert config.trainer.device == {"cpu": "cpu", "1n8g": "cuda"}[scale]
    assert config.trainer.v1.trainer_mode == "distilled_rl"
    OmegaConf.to_container(config, resolve=True)


@pytest.mark.parametrize("mode", MODES)
def test_the_papers_numbers(mode):
    config = composed(mode, ("scale=1n8g",))
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    assert (config.data.train_batch_size, rollout.n, actor.ppo_mini_batch_size, actor.ppo_epochs) == (128, 8, 64, 1)
    assert (config.data.max_prompt_length, config.data.max_response_length) == (2048, 8192)
    assert (actor.optim.lr, actor.optim.lr_scheduler_type, actor.optim.clip_grad) == (1e-6, "constant", 1.0)
    assert actor.loss_agg_mode == "seq-mean-token-mean"
    assert (actor.clip_ratio, actor.clip_ratio_low, actor.clip_ratio_high) == (0.2, 0.2, 0.2)
    assert actor.clip_ratio_c >= 1e6  # the paper has no dual clip
    assert (rollout.temperature, rollout.top_p, rollout.top_k) == (1.0, 1.0, -1)
    assert config.algorithm.adv_estimator == "grpo" and config.algorithm.norm_adv_by_std_in_grpo
    assert not actor.use_kl_loss and not config.algorithm.use_kl_in_reward and actor.entropy_coeff == 0


def test_the_methods_numbers():
    def options(mode):
        return DistilledRLConfig.from_config(composed(mode, ("scale=1n8g",))).options

    assert (options("distilled_rl").eps_rho, options("distilled_rl").normalize) == (3.0, True)
    assert options("distilled_rl").apply_to == "positive"
    assert options("opd").teacher_coef == options("opd_rl").teacher_coef == 1.0


def test_the_authors_code_by_name():
    actor = composed("distilled_rl", OTHERWISE).actor_rollout_ref.actor
    assert (actor.loss_agg_mode, actor.clip_ratio_c) == ("token-mean", 3.0)
    assert (actor.clip_ratio_low, actor.clip_ratio_high) == (0.2, 0.2)


def test_one_node_splits_its_gpus_between_student_and_teacher():
    assert composed("grpo", ("scale=1n8g",)).trainer.n_gpus_per_node == 8
    config = composed("distilled_rl", ("scale=1n8g",))
    assert (config.trainer.n_gpus_per_node, config.distillation.n_gpus_per_node) == (4, 4)


def test_one_seed_reaches_data_sampling_and_mini_batches():
    config = composed("distilled_rl", OTHERWISE)
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    assert {config.data.seed, rollout.seed, actor.data_loader_seed, config.distilled_rl.seed} == {5}
    assert config.run.name.endswith("-seed5")
    assert "val_before_train" not in config.trainer


def test_a_recipe_by_path_builds_on_the_packages_own(tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("defaults: [distilled_rl, _self_]\ndistilled_rl: {eps_rho: 10.0}\n")
    assert find_recipe(str(recipe)) == recipe.resolve()
    config = compose(str(recipe))
    assert (config.distilled_rl.mode, config.distilled_rl.eps_rho) == ("distilled_rl", 10.0)


def test_no_such_recipe():
    message = refusal("distiled_rl")
    assert "no recipe 'distiled_rl' (did you mean distilled_rl?)" in message and "grpo" in message
    assert "no recipe '/nowhere/mine.yaml': give the path of a YAML file" in refusal("/nowhere/mine.yaml")


def test_recipe_that_is_not_yaml(tmp_path):
    (tmp_path / "mine.yaml").write_text("distilled_rl: {eps_rho: 10.0\n")
    assert "recipe mine.yaml: " in refusal(str(tmp_path / "mine.yaml"))


def test_misspelt_overrides_name_the_nearest_keys():
    misspelt = ["distilled_rl.eps_roh=3", "actor_rollout_ref.actor.optim.lrr=1", "techer=none", "~trainer.save_fre"]
    message = refusal("distilled_rl", *misspelt)
    assert message.startswith("recipe distilled_rl.yaml: ")
    assert "unknown key distilled_rl.eps_roh: did you mean distilled_rl.eps_rho?" in message
    assert "unknown key actor_rollout_ref.actor.optim.lrr: did you mean actor_rollout_ref.actor.optim.lr?" in message
    assert "written +actor_rollout_ref.actor.optim.lrr=1" in message
    assert "unknown key techer: did you mean teacher?" in message
    assert "unknown key trainer.save_fre: did you mean trainer.save_freq?" in message
    assert "+~" not in message


def test_options_of_another_mode():
    message = refusal("grpo", "distilled_rl.eps_rho=2", "distilled_rl.teacher_coef=1")
    assert "distilled_rl.eps_rho is an option of mode distilled_rl, and the mode here is grpo" in message
    assert "(its own options: none)" in message
    assert "distilled_rl.teacher_coef is an option of mode opd and opd_rl" in message


def test_option_that_the_recipe_leaves_at_its_default(tmp_path):
    (tmp_path / "mine.yaml").write_text("defaults: [base, _self_]\ndistilled_rl: {mode: distilled_rl}\n")
    message = refusal(str(tmp_path / "mine.yaml"), "distilled_rl.eps_rho=2")
    assert "distilled_rl.eps_rho is valid, but the recipe does not set it: write +distilled_rl.eps_rho=2" in message


def test_choice_that_does_not_exist():
    message = refusal("opd", "teacher=nobody")
    assert "Could not find 'teacher/nobody'" in message and "local" in message and "none" in message
    assert "\n" not in message and "search path" not in message


def test_keys_of_another_teacher():
    message = refusal("distilled_rl", "teacher.temperature=0.6", "teacher.url=http://x", "teacher.key=a")
    assert "teacher.temperature belongs to teacher=temperature: add that to the command" in message
    assert "teacher.url belongs to teacher=url" in message and "teacher.key belongs to teacher=several" in message
    for scale in SCALES:
        assert "teacher.dtype belongs to teacher=colocated" in refusal("opd", f"scale={scale}", "teacher.dtype=bf16")
    message = refusal("opd", "teacher.temprature=0.6")
    assert (
        "unknown key teacher.temprature: did you mean teacher.temperature, which belongs to teacher=temperature?"
        in message
    )
    assert "unknown key teacher.modle: did you mean teacher.model? (" in refusal("opd", "teacher.modle=x")


@pytest.mark.parametrize(("scale", "dtype"), [("cpu", "fp32"), ("1n8g", "bf16")])
def test_a_colocated_teacher_computes_as_the_student_does(scale, dtype):
    overrides = ("teacher=colocated", "teacher.model=/m", f"scale={scale}")
    teacher = composed("distilled_rl", overrides).teacher
    assert (teacher.dtype, teacher.offload, teacher.name) == (dtype, True, "m")
    assert composed("distilled_rl", (*overrides, "teacher.dtype=int8")).teacher.dtype == "int8"


def test_end_of_text_maps_from_the_command_line():
    config = compose("distilled_rl", ["teacher.eos_map={151643: 151645}"])
    assert dict(config.teacher.eos_map) == {151643: 151645}


# ---- several teachers ----

SEVERAL = ("teacher=several", "teacher.key=subject")


def pool(config):
    """Key, path, replicas and GPUs per replica of each model that verl would serve, by node."""
    models = config.distillation.teacher_models
    return {
        name: (node.key, node.model_path, node.num_replicas, node.inference.tensor_model_parallel_size)
        for name, node in models.items()
        if len(models) == 1 or name != "teacher_model"
    }


def test_several_served_teachers_share_the_pool():
    config = compose(
        "distilled_rl",
        [
            *SEVERAL,
            "scale=1n8g",
            "teacher.by_key.algebra={model: /a, n_gpus: 4, tensor_parallel: 2}",
            "teacher.by_key={x/y.z: {source: server, model: /b}}",
            "teacher.by_key.logic={source: colocated, model: /c}",
        ],
    )
    assert pool(config) == {"algebra": ("algebra", "/a", 2, 2), "x_y_z": ("x/y.z", "/b", 1, 1)}
    distillation = config.distillation
    assert (distillation.enabled, distillation.n_gpus_per_node, distillation.nnodes) == (True, 5, 1)
    assert (distillation.teacher_key, config.trainer.n_gpus_per_node) == ("subject", 3)
    assert {node.inference.name for node in distillation.teacher_models.values()} == {"distilled_rl_vllm"}
    OmegaConf.to_container(config, resolve=True)


def test_names_of_served_teachers_do_not_meet():
    entries = ["a.b", "a/b", "teacher_model"]
    config = compose("opd", [*SEVERAL, *(f"teacher.by_key={{{key}: {{model: /{key}}}}}" for key in entries)])
    assert {key for key, *_ in pool(config).values()} == set(entries)
    assert "teacher_model" in config.distillation.teacher_models and len(pool(config)) == 3


def test_one_served_teacher_of_several_is_what_verl_expects():
    # verl/workers/config/distillation.py:290 looks for `teacher_model`
    entries = ["teacher.by_key.a={model: /a, n_gpus: 2}", "teacher.by_key.b={source: url, url: 'http://x'}"]
    config = compose("distilled_rl", [*SEVERAL, *entries, "teacher.nnodes=2"])
    assert pool(config) == {"teacher_model": ("a", "/a", 4, 1)}
    assert (config.distillation.n_gpus_per_node, config.distillation.nnodes) == (2, 2)


def test_several_teachers_without_a_server_have_no_pool():
    config = compose("distilled_rl", [*SEVERAL, "scale=1n8g", "teacher.by_key.a={source: colocated, model: /a}"])
    assert not config.distillation.enabled
    assert (config.distillation.n_gpus_per_node, config.distillation.nnodes) == (0, 0)
    assert config.trainer.n_gpus_per_node == 8


def test_on_a_cpu_each_served_teacher_takes_a_declared_gpu():
    entries = [f"teacher.by_key.{name}={{model: /{name}}}" for name in "abc"]
    config = compose("distilled_rl", [*SEVERAL, "scale=cpu", *entries])
    assert (config.trainer.n_gpus_per_node, config.distillation.n_gpus_per_node) == (1, 3)
    assert config.ray_kwargs.ray_init.num_gpus == 4
    assert config.distillation.teacher_models.c.inference.engine_kwargs.vllm.kv_cache_memory_bytes == 67108864


@pytest.mark.parametrize(
    ("entry", "needle"),
    [
        ("{model: /a, n_gpus: two}", "teacher.by_key.a.n_gpus is 'two': must be a whole number >= 1"),
        ("{model: /a, tensor_parallel: 0}", "teacher.by_key.a.tensor_parallel is 0"),
        ("{model: /a, n_gpus: 3, tensor_parallel: 2}", "does not split into servers of tensor_parallel=2"),
    ],
)
def test_pools_that_cannot_be(entry, needle):
    assert needle in refusal("distilled_rl", *SEVERAL, f"teacher.by_key.a={entry}")


def test_override_without_a_value():
    assert "trainer.save_freq" in refusal("grpo", "trainer.save_freq")


def test_nearest():
    known = ["trainer", "trainer.save_freq", "actor.optim", "actor.optim.lr", "critic.optim.lr", "data.seed"]
    assert nearest("trainer.savefreq", known) == "trainer.save_freq"  # among its siblings
    assert nearest("optim.lr", known) == "actor.optim.lr"  # the same ending, the shortest
    assert nearest("actors.optim.lr", known) == "actor.optim.lr"  # alike as a whole
    assert nearest("zzz", known) is None


def test_flatten():
    config = OmegaConf.create({"a": {"b": "???", "c": "${a.b}"}, "d": [1]})
    assert flatten(config) == {"a": {"b": "???", "c": "${a.b}"}, "a.b": "???", "a.c": "${a.b}", "d": [1]}


def test_a_number_stands_once():
    # what base.yaml sets, no recipe sets again with the same value
    base = flatten(OmegaConf.load(RECIPES / "base.yaml"))  # type: ignore[arg-type]
    for mode in MODES:
        for key, value in flatten(OmegaConf.load(RECIPES / f"{mode}.yaml")).items():  # type: ignore[arg-type]
            assert key == "defaults" or isinstance(value, dict) or base.get(key) != value, f"{mode}.yaml repeats {key}"
