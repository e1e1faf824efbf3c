"""Every refusal of ``check_run``: one thing of a valid run is broken, and the message names the key and the remedy."""

import json
import shutil

import pytest
from omegaconf import OmegaConf

from distilled_rl import launch
from distilled_rl.checks import check_run
from distilled_rl.checks.values import data_files
from distilled_rl.config import ConfigError
from tests.unit.valid_run import CONFIG, PROMPT_LENGTH, RESPONSE_LENGTH, VOCABULARY, rows, write_model, write_parquet

MODES = ("grpo", "opd", "opd_rl", "distilled_rl")
NEEDED = PROMPT_LENGTH + RESPONSE_LENGTH  # 50: what the student's server must hold
ACTOR, ROLLOUT, DISTILLATION = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "distillation"
STUDENT, REF = "actor_rollout_ref.model.path", "actor_rollout_ref.ref"
TEACHER = f"{DISTILLATION}.teacher_models.teacher_model"
LIMITS = f"{ROLLOUT}.max_model_len", f"{TEACHER}.inference.max_model_len"


def refusal(config):
    """The one problem that the checks find."""
    with pytest.raises(ConfigError) as caught:
        check_run(config)
    head, *problems = str(caught.value).splitlines()
    assert head == "1 problem(s) in the configuration:", str(caught.value)
    assert problems[0].startswith("  1. ")
    return "\n".join(problems)


@pytest.mark.parametrize("mode", MODES)
def test_a_valid_run_passes_without_a_warning(make_run, mode):
    assert check_run(make_run(mode)) == []


def test_estimator_may_have_the_packages_own_name(make_run):
    assert check_run(make_run(changes={"algorithm.adv_estimator": "distilled_rl"})) == []


# One changed value, and what the message must say of it.
REFUSED = {
    "mode": ({"distilled_rl.mode": "ppo"}, ["unknown mode 'ppo'", "must be one of distilled_rl, grpo, opd, opd_rl"]),
    "key": ({"distilled_rl.eps_roh": 2.0}, ["unknown key distilled_rl.eps_roh", "did you mean distilled_rl.eps_rho?"]),
    "eps_rho": ({"distilled_rl.eps_rho": 0.5}, ["distilled_rl.eps_rho is 0.5", ">= 1"]),
    "type": ({"distilled_rl.normalize": "yes"}, ["distilled_rl.normalize is 'yes'", "expected bool"]),
    "dump": ({"distilled_rl.dump_steps": [1]}, ["distilled_rl.dump_steps", "distilled_rl.dump_dir"]),
    "trainer": (
        {"trainer.v1.trainer_mode": "sync"},
        ["trainer.v1.trainer_mode is 'sync'", "plain GRPO", "set trainer.v1.trainer_mode=distilled_rl"],
    ),
    "sweep ignored": ({"sweep.runs": [{"mode": "grpo"}]}, ["ignores sweep.runs", "set it to distilled_rl_sweep"]),
    "batch z-score": (
        {"algorithm.adv_estimator": "reinforce_plus_plus"},
        ["algorithm.adv_estimator is 'reinforce_plus_plus'", "scales the teacher's term away", "use grpo or distilled_rl"],
    ),
    "gae": ({"algorithm.adv_estimator": "gae"}, ["algorithm.adv_estimator is 'gae'", "use grpo or distilled_rl"]),
    "reproducible": (
        {
            "distilled_rl.reproducible": True,
            f"{ROLLOUT}.agent.agent_loop_manager_class": None,
            "reward.num_workers": 1,
        },
        ["distilled_rl.reproducible", f"{ROLLOUT}.agent.agent_loop_manager_class is None", "seeds each response"],
    ),
    "nobody grades": (
        {f"{ROLLOUT}.agent.agent_loop_manager_class": None},
        ["reward.num_workers is 0", f"{ROLLOUT}.agent.agent_loop_manager_class is None", "use 1"],
    ),
    "group of one": (
        {f"{ROLLOUT}.n": 1, f"{ACTOR}.ppo_micro_batch_size_per_gpu": 8, f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 16},
        [f"{ROLLOUT}.n is 1", "one alone has no advantage", "use 2 or more"],
    ),
    "no teacher": (
        {"distillation.enabled": False},
        ["mode 'distilled_rl' needs a teacher", "distillation.enabled is false", "teacher=local teacher.model=PATH"],
    ),
    "teacher null": ({"teacher.model": None}, ["teacher.model is null", "set teacher.model=PATH"]),
    "allow": (
        {"teacher.allow": ["eos", "all"]},
        ["teacher.allow names all", "only eos, special_tokens, template can be allowed"],
    ),
    "allow text": ({"teacher.allow": "eos"}, ["teacher.allow is 'eos'", "give a list of names"]),
    "eos_map": ({"teacher.eos_map": {7: 1}}, ["teacher.model: eos_map maps 7", "the student ends a text with 1"]),
    "eos_map text": ({"teacher.eos_map": {"$": 1}}, ["teacher.eos_map is {'$': 1}", "maps token ids to token ids"]),
    "own prompt": ({"teacher.prompt": "own"}, ["teacher.prompt is own", "has no chat template", "set it to student"]),
    "prompt": ({"teacher.prompt": "mine"}, ["teacher.prompt is 'mine'", "must be student or own"]),
    "distillation loss": (
        {f"{DISTILLATION}.distillation_loss.loss_mode": "k3"},
        ["distillation_loss.loss_mode is k3", "distillation_loss.loss_mode=none"],
    ),
    "task rewards": (
        {f"{DISTILLATION}.distillation_loss.use_task_rewards": False},
        ["use_task_rewards is False", "use_task_rewards=true"],
    ),
    "policy gradient": (
        {f"{DISTILLATION}.distillation_loss.use_policy_gradient": True},
        ["use_policy_gradient is True", "use_policy_gradient=false"],
    ),
    "bypass": (
        {"algorithm.rollout_correction.bypass_mode": True},
        ["algorithm.rollout_correction.bypass_mode is true", "set it to false"],
    ),
    "temperature": (
        {f"{ROLLOUT}.temperature": 0.6},
        [f"{ROLLOUT}.temperature is 0.6", "at temperature 1", "ratio of the two would be wrong", "set it to 1.0"],
    ),
    "greedy": ({f"{ROLLOUT}.temperature": 0}, [f"{ROLLOUT}.temperature is 0", "all be the same", "use 1.0"]),
    "val temperature": ({f"{ROLLOUT}.val_kwargs.temperature": -1}, ["val_kwargs.temperature is negative", "use 0"]),
    "top_p": ({f"{ROLLOUT}.top_p": 0.95}, [f"{ROLLOUT}.top_p is 0.95", "over the full softmax", "set it to 1.0"]),
    "top_k": ({f"{ROLLOUT}.top_k": 20}, [f"{ROLLOUT}.top_k is 20", "over the full softmax", "set it to -1"]),
    "lr zero": ({f"{ACTOR}.optim.lr": 0}, [f"{ACTOR}.optim.lr is 0", "must be > 0"]),
    "lr negative": ({f"{ACTOR}.optim.lr": -1e-6}, [f"{ACTOR}.optim.lr is -1e-06", "must be > 0"]),
    "lr text": ({f"{ACTOR}.optim.lr": "small"}, [f"{ACTOR}.optim.lr is 'small'", "must be a number"]),
    "steps": ({"trainer.total_training_steps": 0}, ["trainer.total_training_steps is 0", "whole number >= 1"]),
    "loss_agg": (
        {f"{ACTOR}.loss_agg_mode": "sequence-mean"},
        [f"{ACTOR}.loss_agg_mode is 'sequence-mean'", "must be one of token-mean"],
    ),
    "two KLs": (
        {f"{ACTOR}.use_kl_loss": True, "algorithm.use_kl_in_reward": True, f"{REF}.log_prob_micro_batch_size_per_gpu": 64},
        [f"{ACTOR}.use_kl_loss and algorithm.use_kl_in_reward", "keep one"],
    ),
    "ref micro-batch": (
        {f"{ACTOR}.use_kl_loss": True},
        [f"{REF}.log_prob_micro_batch_size_per_gpu is None", "whole number"],
    ),
    "student context": ({LIMITS[0]: NEEDED - 1}, [f"{LIMITS[0]} is 49", "= 50", "raise dataset.max_model_len to 50"]),
    "teacher context": ({LIMITS[1]: NEEDED}, [f"{LIMITS[1]} is 50", "generated token = 51", "max_model_len to 51"]),
    "token budget": (
        {
            f"{ACTOR}.use_dynamic_bsz": True,
            f"{ACTOR}.ppo_max_token_len_per_gpu": 49,
            f"{ROLLOUT}.log_prob_max_token_len_per_gpu": 50,
        },
        [f"{ACTOR}.ppo_max_token_len_per_gpu gives room for 49 tokens", "= 50: raise it"],
    ),
    "rollout replicas": (
        {f"{ROLLOUT}.tensor_model_parallel_size": 2},
        [f"{ROLLOUT}.tensor_model_parallel_size", "1 trainer GPU(s)", "replicas of 2", "use a divisor"],
    ),
    "teacher pool": (
        {f"{TEACHER}.inference.tensor_model_parallel_size": 2},
        ["distillation.n_gpus_per_node", "pool of 1 GPU(s)", "replicas of 2", "teacher.n_gpus or teacher.tensor_parallel"],
    ),
    "empty teacher pool": ({"teacher.nnodes": 0}, ["distillation.nnodes is 0", "whole number >= 1"]),
    "declared GPUs": ({"ray_kwargs.ray_init.num_gpus": 1}, ["ray_kwargs.ray_init.num_gpus is 1", "take 2", "set it to 2"]),
    "mini-batch": (
        {f"{ACTOR}.ppo_mini_batch_size": 6, f"{ACTOR}.ppo_micro_batch_size_per_gpu": 48},
        [f"{ACTOR}.ppo_mini_batch_size is 6", "no divisor of data.train_batch_size=16", "made-up rows", "use a divisor"],
    ),
    "ranks": (
        {
            "trainer.n_gpus_per_node": 3,
            "ray_kwargs.ray_init.num_gpus": 4,
            "data.train_batch_size": 24,
            f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 64,
        },
        [f"{ACTOR}.ppo_mini_batch_size=8 x {ROLLOUT}.n=8 = 64 responses", "over 3 trainer ranks", "multiple of 3"],
    ),
    "sequence parallel": (
        {f"{ACTOR}.ulysses_sequence_parallel_size": 2},
        [f"{ACTOR}.ulysses_sequence_parallel_size is 2", "no divisor of the 1 trainer GPU(s)"],
    ),
    "dynamic batches": (
        {f"{ROLLOUT}.log_prob_use_dynamic_bsz": True},
        [f"{ROLLOUT}.log_prob_use_dynamic_bsz is True", f"{ACTOR}.use_dynamic_bsz is False", "set them alike"],
    ),
    "micro-batch": (
        {f"{ACTOR}.ppo_micro_batch_size_per_gpu": 48},
        [f"{ACTOR}.ppo_micro_batch_size_per_gpu is 48", "no divisor of the 64 responses", "use a divisor"],
    ),
    "no micro-batch": (
        {f"{ACTOR}.ppo_micro_batch_size_per_gpu": None},
        [f"{ACTOR}.ppo_micro_batch_size_per_gpu is None", "whole number >= 1"],
    ),
    "log-prob micro-batch": (
        {f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 100},
        [f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu is 100", "no divisor of the 128 responses", "use a divisor"],
    ),
    "batch text": ({"data.train_batch_size": "many"}, ["data.train_batch_size is 'many'", "must be a whole number"]),
    "too few rows": (
        {"data.train_batch_size": 128, f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 128},
        ["data.train_batch_size is 128", "data.train_files has 64 rows", "lower it, or add data"],
    ),
    "too few epochs": (
        {"trainer.total_epochs": 1, "trainer.total_training_steps": 5},
        ["trainer.total_epochs is 1", "end after 4 steps", "total_training_steps=5", "raise total_epochs"],
    ),
    "no train file": (
        {"data.train_files": "/nowhere/train.parquet"},
        ["data.train_files: /nowhere/train.parquet does not exist", "scripts/prepare_data.py", "set dataset.train"],
    ),
    "no val file": ({"data.val_files": "/nowhere/v.parquet"}, ["data.val_files: /nowhere/v.parquet does not exist"]),
    "null train file": ({"data.train_files": None}, ["data.train_files is None", "give the path of a file"]),
    "no student": (
        {"student.model": "/nowhere/model"},
        [f"{STUDENT}: /nowhere/model does not exist", "give the folder of a model, or a hub name"],
    ),
    "skipping": (
        {"distilled_rl.skip_zero_advantage": True, f"{ACTOR}.entropy_coeff": 0.01},
        ["distilled_rl.skip_zero_advantage is true", "entropy_coeff is 0.01", "set it to null"],
    ),
    "no such teacher": ({"teacher.model": "./nowhere"}, ["teacher.model: ./nowhere does not exist"]),
    "mandatory": ({"student.model": "???"}, ["student.model has no value (???)", "add student.model=VALUE"]),
    "mandatory mode": ({"distilled_rl.mode": "???"}, ["distilled_rl.mode has no value (???)"]),
    "broken reference": ({"data.max_prompt_length": "${dataset.prompt}"}, ["dataset.prompt"]),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "fragments"), REFUSED.values(), ids=REFUSED.keys())
def test_refused(make_run, changes, fragments):
    message = refusal(make_run(changes=changes))
    for fragment in fragments:
        assert fragment in message, message


def test_all_problems_come_at_once(make_run):
    with pytest.raises(ConfigError) as caught:
        check_run(make_run(changes={f"{ROLLOUT}.temperature": 0.6, "distilled_rl.eps_rho": 0.5, "student.model": "/x"}))
    assert [line[:5] for line in str(caught.value).splitlines()[1:]] == ["  1. ", "  2. ", "  3. "]


def test_grpo_with_a_teacher_is_wasted_scoring(make_run):
    message = refusal(make_run(changes={"distilled_rl": {"mode": "grpo"}}))
    assert "mode 'grpo' uses no teacher" in message and "for nothing; add teacher=none" in message


@pytest.mark.parametrize("mode", ["opd", "opd_rl", "distilled_rl"])
def test_each_teacher_mode_needs_a_teacher(make_run, mode):
    assert f"mode '{mode}' needs a teacher" in refusal(make_run(mode, {"distillation.enabled": False}))


def test_pure_distillation_may_sample_one_response_per_prompt(make_run):
    sizes = {f"{ACTOR}.ppo_micro_batch_size_per_gpu": 8, f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 16}
    assert check_run(make_run("opd", {f"{ROLLOUT}.n": 1, **sizes})) == []


@pytest.mark.parametrize("value", [None, False])
def test_responses_need_not_be_skipped(make_run, value):
    assert (
        check_run(make_run(changes={"distilled_rl.skip_zero_advantage": value, f"{ACTOR}.entropy_coeff": 0.01})) == []
    )
    assert check_run(make_run(changes={"distilled_rl.skip_zero_advantage": True})) == []


def test_sweep_is_checked_run_by_run(make_run):
    sweep = {"trainer.v1.trainer_mode": "distilled_rl_sweep", "distilled_rl": {"mode": "grpo"}}
    assert check_run(make_run(changes=sweep | {"sweep.runs": [{"mode": "grpo"}, {"mode": "opd"}]})) == []
    message = refusal(make_run("grpo", sweep | {"sweep.runs": [{"mode": "grpo"}, {"mode": "opd"}]}))
    assert "mode 'opd' needs a teacher" in message
    message = refusal(make_run(changes=sweep | {"sweep.runs": [{"mode": "grpo"}]}))
    assert "mode 'grpo' uses no teacher" in message


def test_exact_context_passes(make_run):
    # pitfall verl#673: the student needs prompt + response, a teacher one more; the exact number is enough.
    assert check_run(make_run(changes={LIMITS[0]: NEEDED, LIMITS[1]: NEEDED + 1})) == []


def test_model_with_too_few_positions(make_run, tmp_path):
    student = write_model(tmp_path / "student", max_position_embeddings=NEEDED)
    assert check_run(make_run(changes={"student.model": str(student), LIMITS[0]: NEEDED})) == []
    message = refusal(make_run(changes={"student.model": str(student)}))
    assert f"{LIMITS[0]} is 64" in message and "max_position_embeddings" in message and "is 50: shorten" in message


def test_embedding_that_the_weight_sync_cannot_carry(make_run, tmp_path):
    student = write_model(tmp_path / "student", vocab_size=(1 << 20) // 64 + 1)  # 4 MiB and one row, in float32
    key = f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes"
    assert check_run(make_run(changes={"student.model": str(student), key: 5})) == []
    message = refusal(make_run(changes={"student.model": str(student), key: 4}))
    assert f"{key} is 4, but the embedding of {student} takes 4.0 MiB: raise it to 5" in message


# ---- data files ----


def with_train(make_run, path):
    return make_run(changes={"data.train_files": str(path)})


def test_data_file_of_zero_bytes(make_run, tmp_path):
    path = tmp_path / "train.parquet"
    path.touch()
    message = refusal(with_train(make_run, path))
    assert f"data.train_files: {path} is empty (0 bytes)" in message


def test_data_file_without_rows(make_run, tmp_path):
    path = tmp_path / "train.parquet"
    write_parquet(path, rows(1))
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.parquet.read_table(path).slice(0, 0), path)
    assert f"data.train_files: {path} has 0 rows: write it again" in refusal(with_train(make_run, path))


def test_data_file_that_is_not_parquet(make_run, tmp_path):
    path = tmp_path / "train.parquet"
    path.write_text("question,answer\n")
    assert f"data.train_files: {path} cannot be read as parquet" in refusal(with_train(make_run, path))


def test_data_file_of_another_kind(make_run, tmp_path):
    path = tmp_path / "train.csv"
    path.write_text("question,answer\n")
    assert "has the ending '.csv': verl reads .parquet, .json and .jsonl" in refusal(with_train(make_run, path))


@pytest.mark.parametrize("column", ["prompt", "data_source", "reward_model"])
def test_data_column_missing(make_run, tmp_path, column):
    content = [{key: value for key, value in row.items() if key != column} for row in rows(64)]
    message = refusal(with_train(make_run, write_parquet(tmp_path / "train.parquet", content)))
    assert f"lacks the column(s) {column}; it has" in message and "data.prompt_key or data.reward_fn_key" in message


def test_data_prompt_that_is_text(make_run, tmp_path):
    content = [{**row, "prompt": "1+1="} for row in rows(64)]
    message = refusal(with_train(make_run, write_parquet(tmp_path / "train.parquet", content)))
    assert "column prompt is string, not a list of {role, content} messages" in message


def test_data_without_ground_truth(make_run, tmp_path):
    content = [{**row, "reward_model": {"style": "rule"}} for row in rows(64)]
    message = refusal(with_train(make_run, write_parquet(tmp_path / "train.parquet", content)))
    assert "the grader reads reward_model.ground_truth" in message


def test_other_column_names_by_key(make_run, tmp_path):
    content = [{**row, "question": row["prompt"]} for row in rows(64)]
    for row in content:
        del row["prompt"]
    path = str(write_parquet(tmp_path / "train.parquet", content))
    assert (
        check_run(make_run(changes={"data.train_files": path, "data.val_files": path, "data.prompt_key": "question"}))
        == []
    )


@pytest.mark.parametrize("layout", ["lines", "array"])
def test_json_is_read_too(make_run, tmp_path, layout):
    path = tmp_path / ("train.jsonl" if layout == "lines" else "train.json")
    path.write_text("\n".join(map(json.dumps, rows(64))) if layout == "lines" else json.dumps(rows(64)))
    assert check_run(with_train(make_run, path)) == []


def test_rows_of_several_files_add_up(make_run, assets):
    config = make_run(changes={"data.train_files": [str(assets.root / "train.parquet")] * 2})
    assert len(data_files(config, "data.train_files")) == 2
    config = OmegaConf.merge(config, {"data": {"train_batch_size": 128}})
    assert check_run(config) == []


def test_remote_file_is_left_to_the_download(make_run):
    assert check_run(with_train(make_run, "hdfs://cluster/train.parquet")) == []


def test_sample_limit_counts(make_run):
    assert "data.train_files has 8 rows" in refusal(make_run(changes={"data.train_max_samples": 8}))


# ---- model folders ----


def with_student(make_run, path):
    return make_run(changes={"student.model": str(path)})


@pytest.mark.parametrize(
    ("pattern", "fragment"),
    [
        ("config.json", "has no config.json"),
        ("*.safetensors", "has no weights (*.safetensors or *.bin)"),
        ("tokenizer*", "has no tokenizer"),
    ],
)
@pytest.mark.parametrize("role", ["student", "teacher"])
def test_incomplete_model(make_run, tmp_path, role, pattern, fragment):
    folder = write_model(tmp_path / role)
    for file in folder.glob(pattern):
        file.unlink()
    message = refusal(make_run(changes={f"{role}.model": str(folder)}))
    assert fragment in message and (STUDENT if role == "student" else "teacher.model") in message


def test_tokenizer_in_a_folder_of_its_own(make_run, tmp_path):
    folder = write_model(tmp_path / "student")
    (tmp_path / "tokenizer").mkdir()
    for file in folder.glob("tokenizer*"):
        shutil.move(file, tmp_path / "tokenizer" / file.name)
    changes = {"student.model": str(folder), "actor_rollout_ref.model.tokenizer_path": str(tmp_path / "tokenizer")}
    assert check_run(make_run(changes=changes)) == []


def test_model_that_is_a_file(make_run, assets):
    message = refusal(with_student(make_run, assets.root / "student" / "model.safetensors"))
    assert "is a file: give the folder" in message


def test_model_config_that_is_not_json(make_run, tmp_path):
    folder = write_model(tmp_path / "student")
    (folder / "config.json").write_text("{")
    assert f"{STUDENT}: {folder / 'config.json'} is not valid JSON" in refusal(with_student(make_run, folder))


def test_hub_name_offline_and_not_in_the_cache(make_run, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    message = refusal(with_student(make_run, "nobody/no-such-model"))
    assert f"{STUDENT}: nobody/no-such-model is no folder here and not in the Hugging Face cache" in message
    assert "unset it, fill the cache, or give the folder" in message


def test_hub_name_online_is_left_to_the_download(make_run, monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
    assert check_run(make_run("grpo", {"student.model": "nobody/no-such-model"})) == []
    (warning,) = check_run(with_student(make_run, "nobody/no-such-model"))
    assert warning.startswith("teacher.model: the teacher teacher was not compared with the student, as the student's")
    assert "distilled-rl check-teacher STUDENT TEACHER" in warning
    (warning,) = check_run(make_run(changes={"teacher.model": "nobody/no-such-model"}))
    assert "the teacher no-such-model was not compared with the student, as the teacher's configuration" in warning


def test_hub_name_offline_and_in_the_cache(make_run, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--someone--small"
    snapshot = write_model(repository / "snapshots" / "0123456789abcdef")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(snapshot.name)
    assert check_run(with_student(make_run, "someone/small")) == []
    (snapshot / "model.safetensors").unlink()
    assert "has no weights" in refusal(with_student(make_run, "someone/small"))


def test_name_that_the_hub_does_not_allow(make_run):
    message = refusal(with_student(make_run, "some--one/model"))
    assert f"{STUDENT}: some--one/model does not exist, and it is no hub name either" in message


def test_path_with_a_typo_is_no_hub_name(make_run, monkeypatch, tmp_path):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "models" / "student")
    assert "models/studnet does not exist" in refusal(with_student(make_run, "models/studnet"))


@pytest.mark.parametrize("role", ["student", "teacher"])
def test_head_size_without_a_cpu_kernel(make_run, tmp_path, role):
    folder = write_model(tmp_path / role, head_dim=16)
    message = refusal(make_run(changes={f"{role}.model": str(folder)}))
    assert "attention heads of size 16" in message and "head_dim 32, 64, 80" in message and "or a GPU" in message
    # hidden 64 over 4 heads, head_dim not given: 16 again; a GPU takes it
    config = {key: value for key, value in CONFIG.items() if key != "head_dim"} | {"num_attention_heads": 4}
    (folder / "config.json").write_text(json.dumps(config))
    assert "attention heads of size 16" in refusal(make_run(changes={f"{role}.model": str(folder)}))
    check_run(make_run(changes={f"{role}.model": str(folder), "trainer.device": "cuda"}))


# ---- two tokenizers ----


def with_teacher(make_run, tmp_path, **model):
    return make_run(changes={"teacher.model": str(write_model(tmp_path / "teacher", **model))})


def test_same_token_with_another_id(make_run, tmp_path):
    vocabulary = VOCABULARY | {"8": 11, "9": 10}
    message = refusal(with_teacher(make_run, tmp_path, vocabulary=vocabulary))
    assert "teacher.model: 2 of the student's 14 tokens have another id, or none, for the teacher" in message
    assert "'8': 10 and 11" in message and "use a teacher with the student's tokenizer" in message


def test_token_that_the_teacher_lacks(make_run, tmp_path):
    vocabulary = {token: number for token, number in VOCABULARY.items() if token != "+"}
    assert "1 of the student's 14 tokens" in refusal(with_teacher(make_run, tmp_path, vocabulary=vocabulary))


def test_teacher_may_know_more_and_have_a_padded_embedding(make_run, tmp_path):
    assert check_run(with_teacher(make_run, tmp_path, vocabulary=VOCABULARY | {"-": 14}, vocab_size=48)) == []


def test_embedding_of_the_teacher_too_small(make_run, tmp_path):
    message = refusal(with_teacher(make_run, tmp_path, vocab_size=13))
    assert "the student's highest token id is 13, the teacher's vocab_size 13" in message


def test_other_end_of_text(make_run, tmp_path):
    # pitfall ms-swift#9526: the same vocabulary, another eos token
    message = refusal(with_teacher(make_run, tmp_path, eos="="))
    assert "the student ends a text with token id 1 ('$'), the teacher with token id 13 ('=')" in message
    assert "set the same eos_token in both tokenizer_config.json" in message


def test_end_of_text_from_the_generation_config(make_run, tmp_path):
    folder = write_model(tmp_path / "teacher")
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [13, 1]}))
    message = refusal(make_run(changes={"teacher.model": str(folder)}))
    assert "the student ends a text with token id 1 ('$'), the teacher with token id 13 ('=')" in message
    assert "it may stop at 1 too, but that is not what it writes" in message


def test_unknown_end_of_text_is_not_compared(make_run, tmp_path):
    folder = write_model(tmp_path / "teacher")
    (folder / "tokenizer_config.json").write_text("{}")
    assert check_run(make_run(changes={"teacher.model": str(folder)})) == []


def test_difference_allowed_by_name(make_run, tmp_path):
    config = with_teacher(make_run, tmp_path, eos="=")
    assert check_run(OmegaConf.merge(config, {"teacher": {"allow": ["eos"]}})) == []
    assert "put eos into teacher.allow" in refusal(OmegaConf.merge(config, {"teacher": {"allow": ["template"]}}))


def test_chat_template_of_the_teacher_differs(make_run, tmp_path):
    folder = write_model(tmp_path / "teacher")
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    message = refusal(make_run(changes={"teacher.model": str(folder)}))
    assert "teacher.model: the student has no chat template, the other has one" in message


def test_tokenizer_that_cannot_be_compared(make_run, tmp_path):
    folder = write_model(tmp_path / "teacher")
    (folder / "tokenizer.json").unlink()
    message = refusal(make_run(changes={"teacher.model": str(folder)}))
    assert f"teacher.model: {folder / 'tokenizer.json'} does not exist" in message


# ---- warnings ----


@pytest.mark.parametrize(
    ("changes", "fragments"),
    [
        ({f"{ROLLOUT}.top_p": 0.9}, [f"{ROLLOUT}.top_p is 0.9", "not that of the sampler"]),
        ({f"{ROLLOUT}.top_k": 20}, [f"{ROLLOUT}.top_k is 20", "not that of the sampler"]),
        ({f"{ROLLOUT}.calculate_log_probs": False}, [f"{ROLLOUT}.calculate_log_probs is false", "rollout_probs_diff"]),
        ({f"{ACTOR}.policy_loss.loss_mode": "gspo"}, [f"{ACTOR}.policy_loss.loss_mode is 'gspo'", "'vanilla'"]),
        (
            {f"{ROLLOUT}.val_kwargs.temperature": 0, f"{ROLLOUT}.val_kwargs.n": 4},
            [f"{ROLLOUT}.val_kwargs.n is 4 at temperature 0", "the same"],
        ),
    ],
)
def test_warned(make_run, changes, fragments):
    (warning,) = check_run(make_run("grpo", changes))
    for fragment in fragments:
        assert fragment in warning


def test_rollout_temperature_is_free_without_a_teacher(make_run):
    assert check_run(make_run("grpo", {f"{ROLLOUT}.temperature": 0.6})) == []


def test_finished_run_is_named(make_run, tmp_path):
    # pitfall verl#5725: a resumed run at its last step trains nothing and exits with 0
    (tmp_path / "checkpoints" / "global_step_4").mkdir(parents=True)
    (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("4")
    (warning,) = check_run(make_run(changes={"run.dir": str(tmp_path)}))
    assert "holds step 4 of trainer.total_training_steps=4: nothing is left to train" in warning
    assert check_run(make_run(changes={"run.dir": str(tmp_path), "trainer.total_training_steps": 5})) == []


def test_gpu_recipe_on_a_machine_without_one(make_run, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (warning,) = check_run(make_run(changes={"trainer.device": "cuda"}))
    assert "trainer.device is cuda" in warning and "scale=cpu" in warning


# ---- nobody gets past ----


def test_launch_refuses_before_it_touches_anything(make_run, tmp_path):
    config = make_run(changes={"run.dir": str(tmp_path / "run"), f"{ROLLOUT}.temperature": 0.6})
    with pytest.raises(ConfigError, match=r"rollout\.temperature is 0\.6"):
        launch.train(config)
    assert not (tmp_path / "run").exists()
