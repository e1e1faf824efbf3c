"""The report from made-up runs and evaluations: cells against hand-computed numbers, files, and what is left out."""

import dataclasses
import io
import json
import math

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from rich.console import Console

from distilled_rl.miniature.expected import EXPECTED
from distilled_rl.miniature.recipes import TEACHERS
from distilled_rl.report import (
    Evaluation,
    EvaluationError,
    draw_curves,
    learning_curve_csv,
    print_table,
    read_evaluation,
    read_evaluations,
    summarise,
    write_evaluation,
    write_report,
)
from distilled_rl.report.tables import difference_table, result_table
from distilled_rl.runs import Run

TEACHER_MODES = ("opd", "opd_rl", "distilled_rl")


def make_run(mode, seed=1, *, steps=60, total=60, teacher="clean", seconds=3.0):
    """A run whose metrics look like a real one's: validated at step 0 and every tenth, two starts."""
    rng = np.random.default_rng([seed, len(mode), steps])
    final = {"grpo": 0.38, "opd": 0.48, "opd_rl": 0.46}.get(mode, 0.43)
    index = pd.RangeIndex(0, steps + 1, name="step")
    progress = np.linspace(0, 1, steps + 1)
    data = {
        "timing_s/step": np.full(steps + 1, seconds),
        "critic/score/mean": 0.35 + final * progress**0.7 + rng.normal(0, 0.05, steps + 1),
        "response_length/mean": 33 + rng.normal(0, 0.3, steps + 1),
        "actor/entropy": 0.5 - 0.3 * progress + rng.normal(0, 0.01, steps + 1),
        "actor/grad_norm": 1 + rng.exponential(0.3, steps + 1),
    }
    needs_teacher = mode in TEACHER_MODES
    if needs_teacher:
        data["teacher/scored_tokens"] = np.full(steps + 1, 128 * 45.0)
        data["teacher/kl_k1"] = 0.4 - 0.3 * progress + rng.normal(0, 0.02, steps + 1)
    if mode == "distilled_rl":
        for name, level in (
            ("w_std", 0.4),
            ("clip_fraction_high", 0.02),
            ("clip_fraction_low", 0.04),
            ("ess_fraction", 0.9),
        ):
            data[f"rho/{name}"] = level + rng.normal(0, level / 20, steps + 1)
    metrics = pd.DataFrame(data, index=index)
    metrics.iloc[0] = math.nan
    metrics["val-core/chains/acc/mean@1"] = np.where(index % 10 == 0, 0.35 + final * progress**0.7, math.nan)
    return Run(
        name=f"student-{mode}-{teacher if needs_teacher else 'none'}-seed{seed}",
        mode=mode,
        student="student",
        teacher=teacher if needs_teacher else None,
        seed=seed,
        total_steps=total,
        rollouts_per_step=128,
        starts=2,
        metrics=metrics,
    )


def evaluation(role, correct, *, mode=None, seed=None, step=None, teacher=None, greedy=(1, 1, 0, 0), **changes):
    parts = [role, mode, teacher, None if seed is None else f"seed{seed}", step if step != 60 else None]
    fields = {
        "name": "-".join(str(part) for part in parts if part),
        "role": role,
        "model": "models/x",
        "samples": 4,
        "temperature": 1.0,
        "correct": tuple(correct),
        "greedy": greedy,
        "mean_length": 31.5,
        "truncated": 0,
        "mode": mode,
        "seed": seed,
        "step": step,
        "teacher": teacher,
    }
    return Evaluation(**(fields | changes))


def trained(mode, correct, seed=1, step=60, teacher="clean", **changes):
    needs_teacher = mode in TEACHER_MODES
    return evaluation(
        "trained", correct, mode=mode, seed=seed, step=step, teacher=teacher if needs_teacher else None, **changes
    )


def spread(right, problems):
    """`right` of 4 samples each of `problems` problems: all right, then at most one with some right, then all wrong."""
    full, rest = divmod(right, 4)
    return ([4] * full + [rest] + [0] * problems)[:problems]


BASE = evaluation("base", [0, 1, 2, 1])  # 4 of 16
TEACHER = evaluation("teacher", [4, 4, 4, 4], teacher="clean", greedy=(1, 1, 1, 1))  # all right: no spread


def rows(table):
    """The table's rows as {first cell: {column: cell}}."""
    return {row[0]: dict(zip(table.columns, row, strict=True)) for row in table.rows}


def one_seed():
    runs = [make_run("grpo"), make_run("opd", seconds=4.0), make_run("distilled_rl", steps=37)]
    evaluations = [BASE, TEACHER, trained("grpo", [1, 2, 3, 2]), trained("opd", [2, 3, 4, 3])]
    return runs, evaluations


def test_one_seed_one_unfinished_one_mode_missing():
    runs, evaluations = one_seed()
    summary = summarise(runs, evaluations)
    table = rows(result_table(summary))
    assert list(table) == ["base model", "teacher clean", "GRPO", "OPD", "Distilled RL"]
    assert "simulator" not in table["GRPO"]  # nothing expected was given

    base = table["base model"]
    assert base["pass@1 [95 % CI]"].startswith("0.250 [")  # 4 of 16
    assert (base["CI over"], base["greedy"], base["seeds"], base["steps"]) == ("problems", "0.500", "—", "—")

    # without spread: u = 1 - .025^(1/4) = .602, lower end 1 - u = .398
    teacher = table["teacher clean"]
    assert teacher["pass@1 [95 % CI]"] == "1.000 [0.398, 1.000]"
    assert (teacher["CI over"], teacher["greedy"]) == ("problems (all alike)", "1.000")

    grpo = table["GRPO"]
    assert grpo["pass@1 [95 % CI]"].startswith("0.500 [")  # 8 of 16
    assert (grpo["CI over"], grpo["seeds"], grpo["steps"], grpo["rollouts"]) == ("problems", "1", "60", "7,680")
    assert (grpo["teacher tokens"], grpo["minutes"]) == ("—", "3.0")  # 60 steps of 3 s
    opd = table["OPD"]
    assert opd["teacher tokens"] == "345,600"  # 60 steps of 128 rollouts of 45 tokens
    assert opd["minutes"] == "4.0"

    unfinished = table["Distilled RL"]
    assert unfinished["pass@1 [95 % CI]"] == "unfinished"
    assert (unfinished["seeds"], unfinished["steps"], unfinished["rollouts"]) == ("—", "37", "4,736")
    assert summary.left_out == (
        "run student-distilled_rl-clean-seed1: unfinished, 37 of 60 steps; not evaluated there",
    )
    caveats = " ".join(summary.caveats)
    assert "one seed" in caveats and "Equal rollouts (7,680 per run), not equal time" in caveats
    assert "three seeds or more" not in caveats and "two seeds" not in caveats
    assert summary.setting == "pass@1 on 4 problems x 4 samples at temperature 1"


def test_differences_on_the_same_problems():
    runs, evaluations = one_seed()
    table = rows(difference_table(summarise(runs, evaluations)))
    assert list(table) == ["GRPO minus base model", "OPD minus GRPO", "OPD minus base model"]
    # every problem gains exactly 1 of 4 samples: .25 with no spread; u = .602 of problems may differ, down to -1 and
    # up to +1: .25 - .602 x 1.25 = -.503, .25 + .602 x .75 = .702. Sign flips: 2 of 2^4 reach |sum|: p = .125
    over_problems = table["OPD minus GRPO"]["difference [95 % CI]"]
    assert over_problems == "+0.250 [-0.503, +0.702]"
    assert table["OPD minus GRPO"]["p"] == "0.125"
    assert "[95 % CI over seeds]" not in table["OPD minus GRPO"]  # a column for three seeds on
    assert table["OPD minus base model"]["difference [95 % CI]"].startswith("+0.500 [")


def three_seeds():
    runs = [make_run(mode, seed, seconds=2.0 + seed) for mode in ("grpo", "distilled_rl") for seed in (1, 2, 3)]
    runs.append(make_run("distilled_rl", 4, steps=20))
    counts = {"grpo": {1: 8, 2: 9, 3: 7}, "distilled_rl": {1: 10, 2: 12, 3: 11}}  # of 16 samples
    evaluations = [BASE]
    for mode, by_seed in counts.items():
        for seed, right in by_seed.items():
            evaluations.append(trained(mode, spread(right, 4), seed, greedy=(1, 1, seed == 1, 0)))
    evaluations.append(trained("distilled_rl", [0, 0, 0, 0], 4, step=20))
    return runs, evaluations


def test_three_seeds_give_intervals_over_seeds():
    runs, evaluations = three_seeds()
    summary = summarise(runs, evaluations)
    table = rows(result_table(summary))
    # GRPO .5 .5625 .4375: s = .0625, t_{2,.975} s/sqrt(3) = 4.302653 x .036084 = .155258
    assert table["GRPO"]["pass@1 [95 % CI]"] == "0.500 [0.345, 0.655]"
    # Distilled RL .625 .75 .6875: the same spread about .6875; the unfinished seed 4 (0 right) is in no average
    assert table["Distilled RL"]["pass@1 [95 % CI]"] == "0.688 [0.532, 0.843]"
    assert (table["Distilled RL"]["CI over"], table["Distilled RL"]["seeds"]) == ("seeds", "1, 2, 3")
    assert table["Distilled RL"]["minutes"] == "4.0"  # 60 steps of 3, 4 and 5 s
    assert table["Distilled RL"]["greedy"] == "0.583"  # (.75 + .5 + .5)/3
    assert summary.left_out == ("run student-distilled_rl-clean-seed4: unfinished, 20 of 60 steps; pass@1 0.000 there",)
    assert "three seeds or more" in " ".join(summary.caveats)

    difference = rows(difference_table(summary))["Distilled RL minus GRPO"]
    # over seeds .125 .1875 .25: mean .1875, half width .155258, t = .1875/.036084 = 5.196, p = .0351
    assert (difference["[95 % CI over seeds]"], difference["p over seeds"]) == ("[+0.032, +0.343]", "0.035")
    assert difference["difference [95 % CI]"].startswith("+0.188 [")
    assert difference["seeds"] == "1, 2, 3"


def test_two_seeds_are_pooled_over_problems():
    runs = [make_run("grpo", seed) for seed in (1, 2)]
    summary = summarise(runs, [trained("grpo", [0, 1, 2, 3], 1), trained("grpo", [2, 3, 2, 3], 2)])
    row = summary.rows[0]
    assert row.over == "problems, seeds pooled"
    assert row.pass_at_1.value == 0.5 and row.pass_at_1.count == 4  # 6 + 10 of 32, over 4 problems
    assert "two seeds" in " ".join(summary.caveats)
    assert [d.label for d in summary.differences] == []  # neither a base model nor another mode


def test_verdicts_against_the_simulator():
    ones = (1,) * 500
    runs = [make_run(mode) for mode in ("grpo", "opd", "distilled_rl")]
    evaluations = [
        evaluation("base", spread(700, 500), greedy=ones),
        evaluation("teacher", spread(1960, 500), teacher="clean", greedy=ones),
        trained("grpo", spread(1476, 500), greedy=ones),  # .738, as expected
        trained("opd", spread(1616, 500), greedy=ones),  # .808 +- .035: only its own interval reaches .828 - .003
        trained("distilled_rl", spread(1400, 500), greedy=ones),  # .7 +- .040: far below .788 - .011
    ]
    summary = summarise(runs, evaluations, EXPECTED)
    table = rows(result_table(summary))
    assert {name: row["verdict"] for name, row in table.items()} == {
        "base model": "—",
        "teacher clean": "—",
        "GRPO": "inside",
        "OPD": "near",
        "Distilled RL": "outside",
    }
    assert table["GRPO"]["simulator"] == "0.738 ± 0.022 (greedy 0.934)"
    assert table["teacher clean"]["simulator"] == "0.981 (greedy 1.000)"
    differences = rows(difference_table(summary))
    assert differences["Distilled RL minus GRPO"]["simulator"] == "+0.049 ± 0.025"
    assert differences["OPD minus GRPO"]["simulator"] == "—"


def test_nothing_is_expected_of_another_number_of_steps():
    summary = summarise([make_run("grpo", steps=20, total=20)], [trained("grpo", [1, 2, 3, 4], step=20)], EXPECTED)
    assert summary.expected is None and summary.rows[0].verdict == ""
    assert "simulator" not in result_table(summary).columns


def test_the_expected_table_names_the_miniatures_teachers():
    assert set(EXPECTED.teachers) < set(TEACHERS)
    assert {teacher for teacher, _ in EXPECTED.results} == {None, *TEACHERS}


def test_several_teachers_and_lengths_are_told_apart():
    runs = [make_run("grpo"), make_run("opd"), make_run("opd", teacher="weak"), make_run("grpo", steps=20, total=20)]
    evaluations = [trained("opd", [4, 3, 2, 1]), trained("opd", [1, 1, 2, 1], teacher="weak")]
    evaluations += [trained("grpo", [1, 1, 1, 0]), trained("grpo", [1, 1, 0, 0], step=20)]
    summary = summarise([*runs, make_run("distilled_rl")], evaluations)
    table = rows(result_table(summary))
    assert list(table) == [
        "GRPO, 20 steps",
        "GRPO, 60 steps",
        "OPD, clean, 60 steps",
        "Distilled RL, clean, 60 steps",
        "OPD, weak, 60 steps",
    ]
    assert table["Distilled RL, clean, 60 steps"]["pass@1 [95 % CI]"] == "not evaluated"
    labels = [row.label for row in summary.differences]
    assert labels == ["OPD, clean, 60 steps minus GRPO, 60 steps", "OPD, weak, 60 steps minus GRPO, 60 steps"]
    assert "differ in rollouts" in " ".join(summary.caveats)


def test_what_does_not_belong_together_is_listed_not_averaged():
    other = trained("opd", [1, 1, 1, 1, 1], greedy=None)
    evaluations = [BASE, other, trained("grpo", [1, 1, 1, 0]), trained("grpo", [4, 4, 4, 4], step=40)]
    evaluations.append(trained("grpo", [4, 4, 4, 4], seed=9))
    summary = summarise([make_run("grpo"), make_run("opd")], evaluations)
    table = rows(result_table(summary))
    assert table["GRPO"]["pass@1 [95 % CI]"].startswith("0.188 [")
    assert table["OPD"]["pass@1 [95 % CI]"] == "not evaluated"
    assert summary.left_out == (
        "evaluation trained-opd-clean-seed1: pass@1 0.250 on other problems or at another temperature than base "
        "(5 problems at 1, against 4 at 1)",
        "run student-opd-clean-seed1: finished, 60 steps; not evaluated there",
        "evaluation trained-grpo-seed1-40: pass@1 1.000 at step 40, which is no run's last step",
        "evaluation trained-grpo-seed9: pass@1 1.000 at step 60, which is no run's last step",
    )
    hot = dataclasses.replace(trained("grpo", [1, 1, 1, 0]), temperature=0.6)
    assert "at 0.6, against 4 at 1" in summarise([make_run("grpo")], [BASE, hot]).left_out[0]
    elsewhere = dataclasses.replace(trained("grpo", [1, 1, 1, 0]), problem_set="another")
    assert "other problems" in summarise([make_run("grpo")], [BASE, elsewhere]).left_out[0]


def test_contradictions_are_refused():
    with pytest.raises(ValueError, match="same mode, teacher, length and seed 1"):
        summarise([make_run("grpo"), dataclasses.replace(make_run("grpo"), name="copy")], [])
    with pytest.raises(ValueError, match="one student"):
        summarise([make_run("grpo"), dataclasses.replace(make_run("opd"), student="other")], [])
    with pytest.raises(ValueError, match="base and second are of the same model"):
        summarise([], [BASE, dataclasses.replace(BASE, name="second")])


def test_report_files_and_second_call(tmp_path):
    runs, evaluations = one_seed()
    path = write_report(
        tmp_path, runs, evaluations, notes=["a note"], broken=["no run directory x"], title="Quickstart"
    )
    text = path.read_text()
    assert path == tmp_path / "report.md"
    assert text.startswith("# Quickstart\n\nStudent student; pass@1 on 4 problems x 4 samples at temperature 1.\n")
    assert "| GRPO | 0.500 [" in text and "- a note" in text
    assert "unfinished, 37 of 60 steps" in text and "- no run directory x" in text
    pictures = sorted(file.name for file in (tmp_path / "curves").iterdir())
    assert pictures == sorted(
        f"{name}.png"
        for name in "reward held_out response_length entropy teacher_kl rho_w_std rho_clip_fraction rho_ess_fraction "
        "grad_norm step_seconds".split()
    )
    for name in pictures:
        assert f"(curves/{name})" in text
        with Image.open(tmp_path / "curves" / name) as image:
            image.load()
            assert image.format == "PNG" and image.width == 800 and len(image.getcolors(1 << 20) or []) > 20
    assert "Not logged by, so not drawn for: GRPO." in text
    assert "Not logged by, so not drawn for: GRPO; OPD." in text

    # the second call has no Distilled RL: its figures go, nothing else is left behind
    write_report(tmp_path, runs[:2], evaluations)
    text = path.read_text()
    assert "Distilled RL" not in text and "a note" not in text
    assert not (tmp_path / "curves" / "rho_w_std.png").exists()
    assert len(list((tmp_path / "curves").iterdir())) == 7
    assert sorted(file.name for file in tmp_path.iterdir()) == ["curves", "learning_curves.csv", "report.md"]


def test_report_without_anything(tmp_path):
    text = write_report(tmp_path, [], []).read_text()
    assert "No run logged a step." in text and "no evaluation" in text
    no_step = dataclasses.replace(make_run("grpo"), metrics=make_run("grpo").metrics.iloc[:0])
    text = write_report(tmp_path, [no_step], [BASE]).read_text()
    assert "run student-grpo-none-seed1: unfinished, 0 of 60 steps" in text


def test_learning_curve_csv(tmp_path):
    runs = [make_run("grpo", steps=3, total=3), make_run("distilled_rl", 2, steps=2)]
    frame = pd.read_csv(learning_curve_csv(tmp_path / "x.csv", runs))
    assert list(frame) == ["run", "mode", "seed", "step", "metric", "value"]
    assert len(frame) == int(sum(run.metrics.notna().sum().sum() for run in runs))
    line = frame[(frame.run == "student-distilled_rl-clean-seed2") & (frame.step == 2) & (frame.metric == "rho/w_std")]
    assert (line["mode"].item(), line["seed"].item()) == ("distilled_rl", 2)
    assert line["value"].item() == pytest.approx(runs[1].metrics.loc[2, "rho/w_std"])
    assert pd.read_csv(learning_curve_csv(tmp_path / "x.csv", [])).empty


def test_seeds_as_bands_and_a_panel_per_teacher(tmp_path):
    runs = [make_run("grpo", seed) for seed in (1, 2, 3)]
    runs += [make_run("opd", seed, teacher=teacher) for teacher in ("clean", "weak", "peer") for seed in (1, 2, 3)]
    drawn = {figure.curve.key: figure for figure in draw_curves(tmp_path, runs)}
    assert "Several seeds: mean, smallest and largest over the seeds" in drawn["reward"].caption
    assert "rho_w_std" not in drawn
    with Image.open(drawn["reward"].path) as image:
        assert image.width == 800 and image.height == 660  # two rows of panels


def test_print_table():
    runs, evaluations = one_seed()
    stream = io.StringIO()
    print_table(summarise(runs, evaluations, EXPECTED), Console(file=stream, width=100))
    text = stream.getvalue()
    assert "teacher clean" in text and "7,680" in text and "[0.398, 1.000]" in text and "0.738 ± 0.022" in text
    assert "not in the tables: run student-distilled_rl-clean-seed1: unfinished" in text
    assert "OPD minus GRPO" in text and "one seed" in text


def test_evaluation_files(tmp_path):
    first = trained("opd", [1, 2, 3, 4], extras={"steps_right": 0.7}, problem_set="abc")
    path = write_evaluation(first, tmp_path / "eval")
    assert path == tmp_path / "eval" / "trained-opd-clean-seed1.json"
    assert json.loads(path.read_text())["problems"] == 4
    assert read_evaluation(path) == first
    assert (first.pass_at_1, first.greedy_accuracy, first.scores.tolist()) == (0.625, 0.5, [0.25, 0.5, 0.75, 1.0])
    write_evaluation(BASE, tmp_path / "eval")
    assert read_evaluations(tmp_path / "eval") == [BASE, first]
    assert read_evaluations(tmp_path / "nowhere") == []
    assert dataclasses.replace(first, teacher="none").teacher is None


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"correct": (5, 0, 0, 0)}, "more right than sampled"),
        ({"correct": ()}, "at least one problem"),
        ({"greedy": (1,)}, "differ in length"),
        ({"greedy": (2, 0, 0, 0)}, "other numbers"),
        ({"role": "other"}, "unknown role"),
        ({"name": "a/b"}, "no file name"),
        ({"truncated": 17}, "truncated"),
        ({"mean_length": math.nan}, "no length"),
        ({"role": "trained"}, "needs mode, seed and step"),
        ({"role": "teacher"}, "a teacher needs its name"),
    ],
)
def test_contradicting_evaluations_are_refused(changes, message):
    with pytest.raises(EvaluationError, match=message):
        dataclasses.replace(BASE, **changes)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda content: content.pop("samples"), "samples"),
        (lambda content: content.update(colour="red"), "colour"),
        (lambda content: content.update(problems=5), "5 problems announced, 4 found"),
        (lambda content: content.pop("problems"), "problems"),
        (lambda content: content.update(correct=[9, 0, 0, 0]), "more right than sampled"),
    ],
)
def test_broken_evaluation_files_are_named(tmp_path, change, message):
    path = write_evaluation(BASE, tmp_path)
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(EvaluationError, match=f"base.json.*{message}"):
        read_evaluation(path)


@pytest.mark.parametrize("text", ["{", "[]", ""])
def test_evaluation_files_that_are_no_json_object(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(EvaluationError, match=r"x\.json: not an evaluation"):
        read_evaluations(tmp_path)
