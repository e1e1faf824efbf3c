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
