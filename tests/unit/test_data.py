"""Preparing training data: what is read, what is dropped and reported, what is written."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from distilled_rl import data
from distilled_rl.data import Options, prepare
from distilled_rl.data_sources import DAPO_PREFIX, DAPO_SUFFIX, DataError, Row, read_rows
from distilled_rl.grading import compute_score

SCRIPT = Path(__file__).parents[2] / "scripts" / "prepare_data.py"
OPTIONS = Options(data_source="sums")


def load_script() -> ModuleType:
    """By its path: other packages install a top-level `scripts` of their own."""
    spec = importlib.util.spec_from_file_location("prepare_data", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # typer looks the annotations up there
    spec.loader.exec_module(module)
    return module


prepare_data = load_script()


def write_parquet(path: Path, **columns: list) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


def write_text(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def write_lines(path: Path, *records: object) -> Path:
    return write_text(path, "".join(json.dumps(record) + "\n" for record in records))


def rows(*pairs: tuple[str, str]) -> list[Row]:
    return [Row(index, problem, answer) for index, (problem, answer) in enumerate(pairs)]


def many(count: int) -> list[Row]:
    return rows(*((f"{n} + 1 = ?", str(n + 1)) for n in range(count)))


def count_words(texts: list[str]) -> list[int]:
    return [len(text.split()) for text in texts]


def problems(verl_rows: list[dict]) -> list[str]:
    return [row["extra_info"]["problem"] for row in verl_rows]


# ---- reading ----


def test_the_three_layouts_give_the_same_rows(tmp_path: Path):
    expected = [Row(0, "1+1?", "2"), Row(1, "$x$?", "1000")]
    plain = write_parquet(tmp_path / "plain.parquet", problem=["\n1+1?\n", "$x$?"], answer=["2", "1000"], other=[0, 1])
    gsm8k = write_lines(
        tmp_path / "gsm8k.jsonl",
        {"question": "1+1?", "answer": "one and one <<1+1=2>>\n#### 2"},
        {"question": "$x$?", "answer": "#### 1000"},
    )
    prompts = [[{"role": "user", "content": DAPO_PREFIX + text + DAPO_SUFFIX}] for text in ("1+1?", "$x$?")]
    verl = write_parquet(
        tmp_path / "verl.parquet",
        prompt=prompts,
        reward_model=[{"ground_truth": answer, "style": "rule"} for answer in ("2", "1000")],
    )
    for source in (plain, gsm8k, verl):
        assert read_rows(str(source)) == expected


def test_numbers_are_read_as_answers_and_blank_lines_skipped(tmp_path: Path):
    source = write_lines(tmp_path / "a.jsonl", {"problem": "p", "answer": 7})
    source.write_text(source.read_text() + "\n", encoding="utf-8")
    assert read_rows(str(source)) == [Row(0, "p", "7")]


def test_the_hubs_copy_goes_through_the_same_loader(monkeypatch: pytest.MonkeyPatch):
    datasets = pytest.importorskip("datasets")
    asked = []

    def load_dataset(name: str, split: str):
        asked.append((name, split))
        prompt = [{"role": "user", "content": DAPO_PREFIX + "1+1?" + DAPO_SUFFIX}]
        return datasets.Dataset.from_list(
            [{"prompt": prompt, "reward_model": {"ground_truth": "2"}, "ability": "M"}] * 3
        )

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    found = read_rows("BytedTsinghua-SIA/DAPO-Math-17k")
    assert found == [Row(index, "1+1?", "2") for index in range(3)]
    assert asked == [("BytedTsinghua-SIA/DAPO-Math-17k", "train")]


def test_a_hub_that_does_not_answer_is_a_clear_error(monkeypatch: pytest.MonkeyPatch):
    datasets = pytest.importorskip("datasets")

    def load_dataset(*_: object, **__: object):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(DataError, match="some/dataset is no file here, and the hub does not give it"):
        read_rows("some/dataset")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda d: d / "nowhere.parquet", "is no file"),
        (lambda d: d, "is no file"),
        (lambda d: write_text(d / "empty.parquet", ""), "is empty"),
        (lambda d: write_parquet(d / "none.parquet", problem=[], answer=[]), "has no rows"),
        (lambda d: write_text(d / "text.parquet", "problem,answer\n"), "is not a Parquet file"),
        (
            lambda d: write_parquet(d / "a.parquet", problem=["p"], solution=["s"]),
            "has the columns problem, solution: problem",
        ),
        (
            lambda d: write_parquet(d / "a.parquet", problem=[1], answer=["a"]),
            "row 0 .*the problem is int, text is expected",
        ),
        (lambda d: write_parquet(d / "a.parquet", problem=["p"], answer=[None]), "row 0 .*the answer is NoneType"),
        (lambda d: write_parquet(d / "a.parquet", problem=["p"], answer=[["a"]]), "row 0 .*the answer is list"),
        (
            lambda d: write_parquet(d / "a.parquet", prompt=["p"], reward_model=["a"]),
            "prompt or reward_model is not as verl",
        ),
        (
            lambda d: write_lines(d / "a.jsonl", {"problem": "p", "answer": "a"}, {"problem": "p"}),
            "line 2 of .* has the columns",
        ),
        (lambda d: write_lines(d / "a.jsonl", [1]), "line 1 of .* is not a JSON object"),
        (lambda d: write_text(d / "a.jsonl", "{}}\n"), "line 1 of .* is not JSON"),
    ],
)
def test_input_that_cannot_be_used_is_named(tmp_path: Path, make, message: str):
    with pytest.raises(DataError, match=message):
        read_rows(str(make(tmp_path)))


# ---- cleaning ----


def test_duplicates_are_dropped_to_the_first_whatever_their_spacing():
    given = rows(("p q", "1"), ("r", "2"), ("p  q", "1.0"), ("p q", "1"))
    splits, report = prepare(given, OPTIONS)
    assert problems(splits["train"]) == ["p q", "r"]
    assert (report["rows"], report["distinct_problems"], report["distinct_problems_ignoring_spacing"]) == (4, 3, 2)
    assert report["duplicates"] == {"rows": 2, "action": "drop"}
    splits, report = prepare(given, Options(data_source="sums", duplicates="keep"))
    assert len(splits["train"]) == 4 and report["duplicates"] == {"rows": 2, "action": "keep"}


def test_a_problem_with_conflicting_answers_is_dropped_whole_and_named():
    given = rows(("p", "1"), ("q", "0.5"), ("p ", "2"), ("q", r"\frac{1}{2}"), ("p", "1"))
    splits, report = prepare(given, OPTIONS)
    assert problems(splits["train"]) == ["q"]  # 0.5 and 1/2 do not conflict
    assert report["conflicts"] == {
        "problems": 1,
        "rows": 3,
        "action": "drop",
        "which": [{"problem": "p", "answers": ["1", "2"]}],
    }
    splits, report = prepare(given, Options(data_source="sums", conflicts="keep"))
    assert problems(splits["train"]) == ["p", "q", "p "]  # one row for each answer
    assert report["duplicates"]["rows"] == 2


def test_empty_problems_and_answers_are_dropped_and_counted():
    splits, report = prepare(rows(("", "1"), ("p", ""), ("q", "1")), OPTIONS)
    assert problems(splits["train"]) == ["q"] and report["empty"] == {"rows": 2, "action": "drop"}


def test_lengths_are_measured_and_overlong_prompts_dropped():
    # the `boxed` prompt adds 12 words
    given = rows(*((" ".join(["w"] * n), "1") for n in range(1, 101)))
    splits, report = prepare(given, Options(data_source="sums", max_prompt_tokens=102), count_words)
    assert report["prompt_tokens"] == {
        "min": 13,
        "median": 62.5,
        "p95": 107,  # the 95th of 100 ordered lengths
        "max": 112,
        "limit": 102,
        "over_the_limit": 10,
        "action": "drop",
    }
    assert len(splits["train"]) == 90
    splits, report = prepare(given, Options(data_source="sums", max_prompt_tokens=102, overlong="keep"), count_words)
    assert len(splits["train"]) == 100 and report["prompt_tokens"]["over_the_limit"] == 10
    assert prepare(given, OPTIONS)[1]["prompt_tokens"] is None
    with pytest.raises(DataError, match="needs a tokenizer"):
        prepare(given, Options(data_source="sums", max_prompt_tokens=5))


def test_holdout_and_limit_are_drawn_by_seed_disjoint_and_in_order():
    options = Options(data_source="sums", holdout=10, limit=20, seed=3)
    splits, report = prepare(many(100), options)
    train, val = problems(splits["train"]), problems(splits["val"])
    assert (len(train), len(val)) == (20, 10) == (report["written"]["train"], report["written"]["val"])
    assert not set(train) & set(val)
    indices = [row["extra_info"]["index"] for row in splits["train"]]
    assert indices == sorted(indices)
    assert prepare(many(100), options)[0] == splits
    other = prepare(many(100), Options(data_source="sums", holdout=10, limit=20, seed=4))[0]
    assert problems(other["val"]) != val
    larger = prepare(many(100), Options(data_source="sums", holdout=10, limit=40, seed=3))[0]
    assert problems(larger["val"]) == val  # the limit does not move the held-out set
    assert set(train) <= set(problems(larger["train"]))


def test_copies_of_a_problem_are_never_on_both_sides():
    given = many(20) + [Row(20 + row.index, row.problem + " ", row.answer) for row in many(20)]
    splits, _ = prepare(given, Options(data_source="sums", holdout=5, duplicates="keep"))
    assert len(splits["val"]) == 10 and len(splits["train"]) == 30
    assert not {p.strip() for p in problems(splits["val"])} & {p.strip() for p in problems(splits["train"])}


def test_asking_for_more_than_there_is_is_an_error():
    with pytest.raises(DataError, match="5 problems are left, 5 held out and at least 1 for training are asked for"):
        prepare(many(5), Options(data_source="sums", holdout=5))
    with pytest.raises(DataError, match="5 problems are left, 0 held out and 6 for training"):
        prepare(many(5), Options(data_source="sums", limit=6))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt_format": "xml"}, "unknown prompt format 'xml'"),
        ({"conflicts": "first"}, "conflicts must be drop or keep"),
        ({"limit": -1}, "must not be negative"),
        ({"data_source": "miniature/chain"}, "graded as the miniature"),
    ],
)
def test_options_are_checked(options: dict, message: str):
    with pytest.raises(DataError, match=message):
        Options(**{"data_source": "sums", **options})


# ---- verl's schema ----


@pytest.mark.parametrize(
    ("prompt_format", "response"), [("boxed", r"so \boxed{\frac{1}{2}}"), ("dapo", "so\nAnswer: $\\frac{1}{2}$")]
)
def test_a_row_is_verls_and_its_right_answer_is_graded_right(prompt_format: str, response: str):
    options = Options(data_source="halves", prompt_format=prompt_format)
    (row,) = prepare(rows(("What is $1/2$?", "0.5")), options)[0]["train"]
    assert set(row) == {"data_source", "prompt", "ability", "reward_model", "extra_info"}
    assert row["prompt"] == [{"role": "user", "content": data.prompt_text("What is $1/2$?", prompt_format)}]
    assert row["reward_model"] == {"style": "rule", "ground_truth": "0.5"}
    gold, extra_info = row["reward_model"]["ground_truth"], row["extra_info"]
    assert compute_score(row["data_source"], response, gold, extra_info)["score"] == 1.0
    assert compute_score(row["data_source"], "0.5", gold, extra_info)["score"] == 0.0


def test_prompts_say_where_the_answer_goes():
    assert (
        data.prompt_text("P?", "boxed") == "P?\nPlease reason step by step, and put your final answer within \\boxed{}."
    )
    dapo = data.prompt_text("P?", "dapo")
    assert dapo.startswith("Solve the following math problem step by step.") and "\n\nP?\n\n" in dapo
    assert dapo.endswith('put your answer on its own line after "Answer:".')
    assert {form.value for form in prepare_data.PromptFormat} == set(data.PROMPT_FORMATS)


# ---- writing ----


def test_files_are_written_whole_and_read_back(tmp_path: Path):
    data.check_output(tmp_path / "new" / "out", holdout=2)
    splits, report = prepare(many(10), Options(data_source="sums", holdout=2))
    written = data.write(tmp_path / "new/out", splits, report)
    assert [path.name for path in written] == ["train.parquet", "val.parquet", "report.json"]
    assert pq.read_table(written[0]).to_pylist() == splits["train"]
    assert json.loads(written[2].read_text()) == json.loads(json.dumps(report))
    assert sorted(path.name for path in (tmp_path / "new/out").iterdir()) == [
        "report.json",
        "train.parquet",
        "val.parquet",
    ]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    splits, report = prepare(many(3), OPTIONS)
    data.write(tmp_path, splits, report)
    before = (tmp_path / "train.parquet").read_bytes()

    def broken(_: pa.Table, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(data.pq, "write_table", broken)
    with pytest.raises(OSError, match="disk full"):
        data.write(tmp_path, splits, report)
    assert (tmp_path / "train.parquet").read_bytes() == before
    assert not list(tmp_path.glob(".*"))


def test_output_that_cannot_be_written_is_said_first(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot write to"):
        data.check_output(tmp_path / "file" / "out", holdout=0)
    (tmp_path / "val.parquet").write_text("")
    with pytest.raises(DataError, match="another preparation's"):
        data.check_output(tmp_path, holdout=0)
    data.check_output(tmp_path, holdout=3)


# ---- the command ----


def run(*arguments: str):
    app = prepare_data.typer.Typer()
    app.command()(prepare_data.main)
    return CliRunner().invoke(app, list(arguments))


def test_the_command_writes_and_reports(tmp_path: Path):
    source = write_parquet(tmp_path / "sums.parquet", problem=["1+1?", "1+1?", "2+2?"], answer=["2", "2", "4"])
    result = run(str(source), "--out", str(tmp_path / "out"), "--prompt-format", "dapo")
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert (report["rows"], report["distinct_problems"], report["duplicates"]["rows"]) == (3, 2, 1)
    assert report["options"]["data_source"] == "sums" and report["source"] == str(source)
    assert '"distinct_problems": 2' in result.output and "train.parquet" in result.output


def test_the_command_explains_failures_in_a_line_and_writes_nothing(tmp_path: Path):
    source = write_parquet(tmp_path / "sums.parquet", problem=["1+1?"], answer=["2"])
    for arguments, message in (
        ([str(tmp_path / "gone.parquet")], "is no file"),
        ([str(source), "--max-prompt-tokens", "9"], "needs --tokenizer"),
        ([str(source), "--tokenizer", str(tmp_path / "gone")], "is no directory"),
        ([str(source), "--holdout", "4"], "1 problems are left"),
    ):
        result = run(*arguments, "--out", str(tmp_path / "out"))
        assert result.exit_code == 1 and message in result.output, result.output
        assert result.output.startswith("Error: ") and "Traceback" not in result.output
    assert not list((tmp_path / "out").iterdir())


def test_the_script_runs_from_anywhere(tmp_path: Path):
    source = write_lines(tmp_path / "a.jsonl", {"problem": "1+1?", "answer": "2"})
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[1])}
    command = [sys.executable, str(SCRIPT), source.name, "--out", "out"]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, timeout=120)
    assert pq.read_table(tmp_path / "out/train.parquet").num_rows == 1


# ---- the real file ----


def test_dapo_with_qwens_tokenizer(tmp_path: Path):
    root = Path(os.environ.get("DISTILLED_RL_SHARED", Path(__file__).parents[3] / "shared")) / "data"
    source, tokenizer = root / "train/train_dapo.parquet", root / "tokenizer_qwen3"
    if not source.is_file() or not tokenizer.is_dir():
        pytest.skip(f"no DAPO file and tokenizer under {root} (set DISTILLED_RL_SHARED)")
    counter = data.chat_token_counter(str(tokenizer))
    given = read_rows(str(source))
    splits, report = prepare(given, Options(data_source="dapo", max_prompt_tokens=512, holdout=100), counter)
    assert (report["rows"], report["distinct_problems"], report["conflicts"]["problems"]) == (17_917, 17_255, 12)
    assert report["distinct_problems_ignoring_spacing"] == 17_188
    assert report["conflicts"]["rows"] == 24 and len(report["conflicts"]["which"]) == 12
    assert report["duplicates"]["rows"] == 717
    lengths = report["prompt_tokens"]
    assert [lengths[key] for key in ("min", "median", "p95", "max", "over_the_limit")] == [35, 104, 213, 1511, 51]
    # 17,917 rows - 24 with conflicting answers - 717 repeated - 51 overlong
    assert report["written"] == {"train": 17_025, "val": 100} and 17_917 - 24 - 717 - 51 == 17_125
    data.check_output(tmp_path, holdout=100)
    data.write(tmp_path, splits, report)
    # the count is the one that verl filters by
    from transformers import AutoTokenizer

    chat = pq.read_table(tmp_path / "val.parquet").to_pylist()[0]["prompt"]
    ids = AutoTokenizer.from_pretrained(tokenizer).apply_chat_template(
        chat, add_generation_prompt=True, return_dict=False
    )
    assert counter([chat[0]["content"]]) == [len(ids)]
