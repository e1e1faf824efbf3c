"""The command line: what it prints, what it passes on, and how it refuses."""

import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from distilled_rl import launch, recipe
from distilled_rl.cli import app, describe


@pytest.fixture
def started(monkeypatch):
    """The configurations that training was started with; none is really started."""
    configs = []
    monkeypatch.setattr(launch, "train", configs.append)
    return configs


@pytest.fixture
def composed(monkeypatch):
    """Let every recipe compose to a given configuration."""
    return lambda config: monkeypatch.setattr(recipe, "compose", lambda *_: config)


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_check_says_what_would_run(assets, started):
    result = run("check", "distilled_rl", *assets.overrides("distilled_rl"))
    assert result.exit_code == 0, result.output
    lines = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
    assert lines["mode"] == "distilled_rl (eps_rho=3.0, normalize=True, apply_to=positive), seed 1"
    assert lines["student"] == str(assets.root / "student")
    assert lines["teacher"] == str(assets.root / "teacher")
    assert lines["data"] == (
        f"64 rows of {assets.root / 'train.parquet'}; validation 8 rows of {assets.root / 'val.parquet'}"
    )
    assert lines["lengths"] == "prompts up to 16 tokens, responses up to 34"
    assert lines["batch"] == "16 prompts x 8 responses at temperature 1; 2 update(s) of 8 prompts"
    assert lines["optimiser"] == "AdamW, learning rate 1e-06, constant"
    assert lines["steps"] == "4; validation every 20, checkpoint every 20"
    assert lines["loss"] == "seq-mean-token-mean, clip 0.2/0.2, no dual clip"
    assert lines["device"] == "cpu: 1 to train, 1 for the teacher"
    assert lines["output"] == f"{assets.root / 'runs'}/student-distilled_rl-teacher-seed1"
    assert not started


def test_describe_without_a_teacher_and_with_the_authors_loss(make_run):
    lines = dict(describe(make_run("grpo", {"actor_rollout_ref.actor.clip_ratio_c": 3.0})))
    assert (lines["mode"], lines["teacher"], lines["device"]) == ("grpo, seed 1", "none", "cpu: 1 to train")
    assert lines["loss"].endswith("dual clip 3")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"source": "colocated", "enabled": False, "dtype": "bf16", "model": "/m"}, "/m, bf16, beside the student"),
        ({"source": "temperature", "enabled": False, "temperature": 0.6}, "the student at temperature 0.6"),
        ({"source": "url", "enabled": False, "url": "http://x", "model": None}, "http://x"),
        ({"source": "url", "enabled": False, "url": "http://x", "model": "/m"}, "/m at http://x"),
        ({"model": "/m", "prompt": "own"}, "/m, reads its own prompt"),
        ({"model": "/m", "eos_map": {1: 13}}, "/m, scores end of text 1 as 13"),
    ],
)
def test_describe_each_kind_of_teacher(make_run, changes, text):
    config = make_run(changes={f"teacher.{key}": value for key, value in changes.items()})
    assert [line for label, line in describe(config) if label == "teacher"] == [text]


def test_describe_several_teachers(make_run):
    entries = {"a": {"source": "colocated", "model": "/m"}, "b": {"source": "url", "url": "http://x", "prompt": "own"}}
    several = {"source": "several", "enabled": False, "by_key": entries, "dtype": "fp32"}
    config = make_run(changes={f"teacher.{key}": value for key, value in several.items()})
    lines = [line for label, line in describe(config) if label == "teacher"]
    assert lines == ["a: /m, fp32, beside the student", "b: http://x, reads its own prompt"]


def test_check_prints_what_was_not_compared(assets, started, monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
    overrides = [item for item in assets.overrides("opd") if not item.startswith("teacher.model")]
    result = run("check", "opd", *overrides, "teacher.model=nobody/no-such-model")
    assert (
        result.exit_code == 0 and "warning: teacher.model: the teacher no-such-model was not compared" in result.stderr
    )


def test_train_passes_every_kind_of_override_on(assets, started):
    overrides = ["+trainer.note=mine", "~actor_rollout_ref.nccl_timeout", "seed=3", "loss=authors_code"]
    result = run("train", "opd", *assets.overrides("opd"), *overrides, "distilled_rl.teacher_coef=0.5")
    assert result.exit_code == 0, result.output
    (config,) = started
    assert (config.trainer.note, config.distilled_rl.seed, config.distilled_rl.teacher_coef) == ("mine", 3, 0.5)
    assert "nccl_timeout" not in config.actor_rollout_ref
    assert config.actor_rollout_ref.actor.loss_agg_mode == "token-mean"


def test_dry_run_stops_before_training_and_prints_warnings(make_run, composed, started):
    composed(make_run("grpo", {"actor_rollout_ref.rollout.top_p": 0.9}))
    result = run("train", "grpo", "a=b", "--dry-run")
    assert result.exit_code == 0 and not started
    assert "mode" in result.stdout
    assert "warning: actor_rollout_ref.rollout.top_p is 0.9" in result.stderr


def test_all_problems_are_printed_with_exit_code_2(make_run, composed, started):
    composed(make_run("opd", {"distilled_rl.teacher_coef": 0.0, "actor_rollout_ref.rollout.temperature": 0.6}))
    result = run("train", "opd")
    assert result.exit_code == 2 and not started
    assert "2 problem(s) in the configuration:" in result.stderr
    assert "distilled_rl.teacher_coef is 0.0" in result.stderr and "rollout.temperature is 0.6" in result.stderr
    assert result.stdout == ""


def test_missing_value_is_named(make_run, composed):
    composed(make_run("grpo", {"student.model": "???"}))
    result = run("check", "grpo")
    assert result.exit_code == 2
    assert "student.model has no value (???): add student.model=VALUE" in result.stderr


def test_no_such_recipe():
    result = run("train", "grppo")
    assert result.exit_code == 2
    assert "no recipe 'grppo' (did you mean grpo?)" in result.stderr


def test_other_errors_are_not_swallowed(make_run, composed, monkeypatch):
    composed(make_run("grpo"))
    monkeypatch.setattr(launch, "train", lambda config: 1 / 0)
    result = run("train", "grpo")
    assert isinstance(result.exception, ZeroDivisionError)


def test_help_is_quick():
    code = (
        "import sys; sys.argv = ['distilled-rl', '--help']\n"
        "from distilled_rl.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "heavy = {'torch', 'verl', 'ray', 'vllm', 'transformers', 'pyarrow', 'hydra'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert "train" in done.stdout and "check" in done.stdout


def test_refusal_of_a_process_is_a_message_and_starts_nothing(assets, tmp_path):
    code = (
        "import sys; from distilled_rl.cli import main\n"
        "try: main()\n"
        "finally: assert not {'verl', 'ray', 'vllm', 'transformers'} & set(sys.modules)\n"
    )
    overrides = [*assets.overrides("distilled_rl"), "actor_rollout_ref.rollout.temperature=0.6"]
    done = subprocess.run(
        [sys.executable, "-c", code, "train", "distilled_rl", *overrides],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"RAY_TMPDIR": str(tmp_path)},
    )
    assert done.returncode == 2, done.stderr
    assert "actor_rollout_ref.rollout.temperature is 0.6" in done.stderr and "set it to 1.0" in done.stderr
    assert "Traceback" not in done.stderr and done.stdout == ""
    assert not list(tmp_path.iterdir())
