"""Run directories: merging the logs of several starts, killed runs, and what is wrong with a broken one."""

import json
import math

import pytest
import yaml
from omegaconf import OmegaConf

from distilled_rl.recipe import compose
from distilled_rl.runs import RunError, find_runs, read_run, read_runs

CONFIG = {
    "run": {"name": "student-distilled_rl-clean-seed3"},
    "distilled_rl": {"mode": "distilled_rl"},
    "student": {"name": "student"},
    "teacher": {"name": "clean", "enabled": True},
    "seed": 3,
    "data": {"train_batch_size": 16},
    "actor_rollout_ref": {"rollout": {"n": 8}},
    "trainer": {"total_training_steps": 4},
}
SECONDS = 30.0


def train_line(step, **metrics):
    return json.dumps({"step": step, "data": {"timing_s/step": SECONDS, "critic/score/mean": step / 10, **metrics}})


def validation_line(step, accuracy):
    return json.dumps({"step": step, "data": {"val-core/chains/acc/mean@1": accuracy}})


@pytest.fixture
def make_run(tmp_path):
    def make(*logs, name="a run", config=CONFIG, **changes):
        directory = tmp_path / name
        directory.mkdir()
        (directory / "config.yaml").write_text(yaml.safe_dump(config | changes))
        for number, lines in enumerate(logs):
            text = lines if isinstance(lines, str) else "".join(f"{line}\n" for line in lines)
            (directory / f"metrics-{number:03d}.jsonl").write_text(text)
        return directory

    return make


def test_a_finished_run(make_run):
    lines = [validation_line(0, 0.35)]
    lines += [
        train_line(step, **{"perf/total_num_tokens": 2500, "teacher/scored_tokens": 1000}) for step in (1, 2, 3, 4)
    ]
    run = read_run(make_run(lines))
    assert (run.name, run.mode, run.student, run.teacher, run.seed) == (
        "student-distilled_rl-clean-seed3",
        "distilled_rl",
        "student",
        "clean",
        3,
    )
    assert run.finished and run.status == "finished, 4 steps"
    assert (run.steps, run.total_steps, run.starts) == (4, 4, 1)
    assert run.minutes == 2.0  # 4 steps of 30 s
    assert run.rollouts == 4 * 16 * 8
    assert run.teacher_tokens == 4000
    assert run.metrics.index.tolist() == [0, 1, 2, 3, 4] and run.metrics.index.name == "step"
    assert math.isnan(run.metrics.loc[0, "critic/score/mean"])
    assert run.column("critic/score/mean").to_dict() == {1: 0.1, 2: 0.2, 3: 0.3, 4: 0.4}
    assert run.column("val-core/chains/acc/mean@1").to_dict() == {0: 0.35}
    assert run.column("no such metric").empty


def test_a_mode_without_a_teacher_has_none_although_one_is_configured(make_run):
    run = read_run(make_run([train_line(1)], distilled_rl={"mode": "grpo"}))
    assert run.teacher is None and run.teacher_tokens == 0


def test_a_later_start_replaces_the_steps_that_it_repeats(make_run):
    first = [train_line(step, kept=1, lost=1) for step in (1, 2, 3, 4)]
    run = read_run(make_run(first, [train_line(3, kept=2)]))  # continued behind step 2, killed behind step 3
    assert run.column("kept").to_dict() == {1: 1, 2: 1, 3: 2}
    assert run.column("lost").to_dict() == {1: 1, 2: 1}
    assert (run.steps, run.starts, run.minutes) == (3, 2, 1.5)
    assert not run.finished and run.status == "unfinished, 3 of 4 steps"


def test_a_later_start_that_validates_first_keeps_the_step_it_continues_from(make_run):
    first = [validation_line(0, 0.3), train_line(1), train_line(2), train_line(3)]
    run = read_run(make_run(first, [validation_line(2, 0.5), train_line(3, again=1)]))
    assert run.column("critic/score/mean").to_dict() == {1: 0.1, 2: 0.2, 3: 0.3}
    assert run.column("val-core/chains/acc/mean@1").to_dict() == {0: 0.3, 2: 0.5}
    assert run.column("again").to_dict() == {3: 1}
    # a start that only validated takes back what had been trained behind its checkpoint
    assert read_run(make_run(first, [validation_line(1, 0.4)], name="two")).steps == 1


def test_starts_that_logged_nothing_change_nothing(make_run):
    run = read_run(make_run("", [train_line(1), train_line(2)], ""))
    assert (run.steps, run.starts) == (2, 3)


@pytest.mark.parametrize("rest", [train_line(2)[:40], train_line(2)[:40] + "\n", '{"step', "\0\0\0", "{"])
def test_the_cut_last_line_of_a_killed_run_is_ignored(make_run, rest):
    run = read_run(make_run(train_line(1) + "\n" + rest, [train_line(2)]))
    assert run.steps == 2
    assert read_run(make_run(train_line(1) + "\n" + rest, name="not restarted")).steps == 1


@pytest.mark.parametrize(
    "line, message",
    [
        (train_line(2)[:40], "metrics-000.jsonl, line 2: not JSON"),
        ("[1, 2]", 'metrics-000.jsonl, line 2: expected {"step"'),
        ('{"step": "2", "data": {}}', "line 2: expected"),
        ('{"step": 2}', "line 2: expected"),
    ],
)
def test_a_broken_line_elsewhere_is_named(make_run, line, message):
    with pytest.raises(RunError, match=message.replace("{", r"\{")):
        read_run(make_run([train_line(1), line, train_line(3)]))


def test_a_last_line_that_is_json_of_another_form_is_an_error(make_run):
    with pytest.raises(RunError, match="line 2: expected"):
        read_run(make_run([train_line(1), "17"]))


def test_values_that_are_no_numbers(make_run):
    line = json.dumps({"step": 1, "data": {"timing_s/step": 1, "text": "x", "list": [1], "nan": None, "flag": True}})
    run = read_run(make_run([line]))
    assert set(run.metrics) == {"timing_s/step", "nan", "flag"}
    assert run.metrics.loc[1, "flag"] == 1.0 and run.column("nan").empty


@pytest.mark.parametrize("logs", [(), ("",), ("", "")])
def test_a_run_that_logged_no_step(make_run, logs):
    run = read_run(make_run(*logs))
    assert (run.steps, run.minutes, run.rollouts, run.starts) == (0, 0.0, 0, len(logs))
    assert run.status == "unfinished, 0 of 4 steps"
    assert run.column("critic/score/mean").empty


def test_a_run_of_unknown_length_is_not_called_finished(make_run):
    run = read_run(make_run([train_line(1)], trainer={"total_training_steps": None}))
    assert not run.finished and run.status == "1 steps, planned number unknown"


def test_missing_and_empty_directories(tmp_path):
    with pytest.raises(RunError, match="no run directory"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(RunError, match=r"has no config\.yaml"):
        read_run(tmp_path)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"seed": None}, "config.yaml: seed is missing"),
        ({"data": {}}, "data.train_batch_size is missing"),
        ({"data": {"train_batch_size": "16"}}, "data.train_batch_size is '16', expected an integer"),
        ({"distilled_rl": {"mode": "magic"}}, "config.yaml: unknown mode 'magic'"),
        ({"distilled_rl": "magic"}, "distilled_rl.mode is missing"),
    ],
)
def test_a_broken_configuration_is_named(make_run, changes, message):
    with pytest.raises(RunError, match=message):
        read_run(make_run([train_line(1)], **changes))


@pytest.mark.parametrize("text, message", [("a: [1", "cannot be read"), ("- 1", "expected a mapping"), ("", "mapping")])
def test_a_configuration_that_is_no_yaml_mapping(make_run, text, message):
    directory = make_run([train_line(1)])
    (directory / "config.yaml").write_text(text)
    with pytest.raises(RunError, match=message):
        read_run(directory)


def test_a_sweeps_own_directory_is_no_run(make_run, tmp_path):
    make_run([train_line(4)], name="run", trainer={"total_training_steps": 4, "v1": {"trainer_mode": "sync"}})
    directory = make_run(name="sweep-clean")
    OmegaConf.save(compose("miniature_sweep"), directory / "config.yaml", resolve=True)  # as `launch.train` does
    assert [path.name for path in find_runs(tmp_path)] == ["run"]


def test_several_runs(make_run, tmp_path):
    make_run([train_line(4)], name="b")
    make_run([train_line(1), "{", train_line(3)], name="broken")
    (tmp_path / "no run").mkdir()
    assert [path.name for path in find_runs(tmp_path)] == ["b", "broken"]
    runs, broken = read_runs(find_runs(tmp_path))
    assert [run.steps for run in runs] == [4]
    assert len(broken) == 1 and "metrics-000.jsonl, line 2" in broken[0]
