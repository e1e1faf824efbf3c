r"""The grader: verdicts on graded pairs, hostile input in bounded time, children that are killed and replaced.

Pairs are (answer, gold). What every pair is, right or wrong, was decided by a person before the grader was asked.
"""

import concurrent.futures
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from distilled_rl.grading import Grader, GraderError, Verdicts, canonical, compute_score, extract, grade, pool, worker
from distilled_rl.grading.rules import decide

KEYS = {
    "score": float,
    "acc": float,
    "pred": str,
    "boxed": int,
    "mathruler": int,
    "math_verify": int,
    "timeout": int,
    "crash": int,
}

RIGHT = [
    # the same text, the same number
    ("5", "5"),
    ("204", r"\boxed{204}"),
    ("-5", "- 5"),
    ("+5", "5"),
    ("5.", "5"),
    (".5", "0.5"),
    ("3.0", "3"),
    ("0.5", r"\frac{1}{2}"),
    ("1/2", r"\frac12"),
    (r"\dfrac{1}{2}", r"\tfrac12"),
    (r"\frac{2}{4}", r"\frac{1}{2}"),
    (r"1\frac{1}{2}", r"\frac{3}{2}"),
    ("1 1/2", "1.5"),
    (r"-1\frac{1}{2}", r"-\frac{3}{2}"),
    (r"0.\overline{3}", r"\frac{1}{3}"),
    ("1,000", "1000"),
    (r"1\,000", "1000"),
    ("1{,}000", "1000"),
    ("10^{-6}", "1e-6"),
    (r"8.7\times10^{8}", "8.7e8"),
    (r"8.7 \cdot 10^8", "8.7e8"),
    ("870000000", "8.7e8"),
    (r"1.6\times 10^{-19} \mathrm{~C}", "1.6e-19"),
    ("1.5E3", "1500"),
    ("\u22127", "-7"),
    # units, currency, percent, degrees
    (r"12\text{ cm}", "12"),
    ("12", r"12 \mathrm{~cm}"),
    ("12 cm", r"12\text{ centimeters}"),
    (r"864 \text{ in}^2", r"864 \mbox{ inches}^2"),
    (r"12 \mathrm{~m} / \mathrm{s}", "12"),
    (r"\$5.00", "5"),
    (r"5 \text{ dollars}", r"\$5"),
    (r"5 \text{ million}", "5000000"),
    (r"50\%", "50"),
    (r"50\%", "0.5"),
    (r"90^\circ", "90"),
    # choices and words
    (r"\textbf{(B)}", "B"),
    (r"\text{(B)}", "(B)"),
    (r"\text{East}", "east"),
    ("SRMC=LRMC", "SRMC=LRMC"),
    # names and chains of equalities
    ("x=5", "5"),
    (r"\theta = \frac{\pi}{2}", r"\frac{\pi}{2}"),
    (r"x \in [-2,7]", "[-2,7]"),
    ("f(x)=2x", "2x"),
    ("m+n=7", "7"),
    (r"x = \frac{1}{2} = 0.5", "0.5"),
    ("x=2, x=3", "2,3"),
    ("y = 1 - x", "x + y = 1"),
    ("2x=10", "x=5"),
    # tuples, sets, lists, intervals
    (r"\{1,3,2\}", r"\{1,2,3\}"),
    ("2, 1, 2", "1, 2, 2"),
    ("(1,1,x+2)", "(1,1,2+x)"),
    ("{1,2}", r"\{1,2\}"),
    ("1,3,2", "1,2,3"),
    (r"5 \text{ or } 7", "5,7"),
    (r"\left(\frac{1}{2}, 3\right)", "(0.5,3)"),
    ("(1,2),(3,4)", "(3,4),(1,2)"),
    (r"(2,3)\cup(0,1)", r"(0,1) \cup (2,3)"),
    ("1<x<2", "(1,2)"),
    (r"\pm 2", "-2,2"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{bmatrix} 1 \\ 2 \end{bmatrix}"),
    # algebra
    ("x^2+2x+1", "(x+1)^2"),
    (r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt{3}}"),
    ("2^{99}", "633825300114114700748351602688"),
    ("10!", "3628800"),
    (r"\binom{5}{2}", "10"),
    ("6^3", "216"),
    ("2>x", "x<2"),
    (r"100\sqrt{p}", r"100 p^{\frac{1}{2}}"),
    (r"\frac{1}{2}x", r"\frac{x}{2}"),
    ("x_{1}", "x_1"),
    ("4343_{6}", "4343_6"),
]

WRONG = [
    ("4", "5"),
    ("-5", "5"),
    ("0.3333", r"\frac{1}{3}"),
    ("0.333333", r"\frac{1}{3}"),
    (r"0.\overline{3}", "0.3"),
    (r"2\pi", "6.28318"),
    (r"2\pi", "6.283185"),
    (r"\sqrt{2}", "1.41421"),
    ("e", "2.71828"),
    (r"2.6\times10^{-19}", "1.6e-19"),
    ("1e-7", "2e-7"),
    ("0", "1e-20"),
    (r"10^{-20}\sqrt{2}", "10^{-20}"),
    ("12,34", "1234"),
    ("1 2", "3"),
    ("1 2", "12"),
    ("2^{10}", "210"),
    (r"\binom{5}{2}", "52"),
    (r"-1\frac{1}{2}", r"-\frac{1}{2}"),
    # brackets and order
    ("(1,2]", "(1,2)"),
    ("[1,2]", "(1,2)"),
    ("(2,1)", "(1,2)"),
    ("(3,1)", "(2,1)"),
    ("(1,2)", r"\{1,2\}"),
    (r"\{1,2\}", "[1,2]"),
    (r"(-\infty,0]", r"(-\infty,0)"),
    (r"(0,1)\cap(2,3)", r"(0,1)\cup(2,3)"),
    (r"1\le x<2", "(1,2)"),
    (r"x\le 2", "x<2"),
    ("(1,2),(3,4)", "(1,2),(4,3)"),
    # some of the values, or more of them
    ("5", r"5\text{ or }7"),
    (r"5\text{ or }7", "5"),
    ("1/2or1", "1/2"),
    ("1,2", "1,2,3"),
    ("1,1,2", "1,2"),
    ("16,3,1,3", "16,3,1,1"),
    (r"\{1,1,2\}", r"\{1,2,2\}"),
    (r"2", r"\pm 2"),
    (r"1,2,\ldots,10", "1,2,10"),
    # names, equations
    ("y=5", "x=5"),
    ("2x=5", "y=5"),
    ("3=5", "5"),
    (r"x = \frac{1}{2} = 0.4", "0.5"),
    (r"7 \neq 5", "5"),
    ("x>5", "5"),
    ("x^2=-1", "x^2=-4"),
    ("SRAC=LRAC", "SRMC=LRMC"),
    # units and words
    (r"12\text{ km}", r"12\text{ m}"),
    (r"5 \text{ million}", "5"),
    (r"\text{not } 5", "5"),
    (r"\text{at least } 5", "5"),
    (r"5 \text{ or more}", "5"),
    (r"\text{west}", r"\text{east}"),
    ("A", "B"),
    # what is lost when braces or letters are dropped
    (r"a+\frac{b}{c}", r"\frac{a+b}{c}"),
    (r"1+\frac{\sqrt{31}}{2}", r"\frac{1+\sqrt{31}}{2}"),
    (r"\frac{1}{2x}", r"\frac{1}{2}x"),
    ("e^{2}t", "e^{2t}"),
    ("e^{2}t", "e^{2}t^{2}"),
    (r"e^{2}\theta", "e^{2}"),
    (r"\sqrt[3]{2}", r"\sqrt{2}"),
    (r"\overline{AB}", "AB"),
    ("x'", "x"),
    ("f(2)", "2f"),
    (r"\frac{1}{3} E_{3}+\frac{2}{3} E_{2}", r"\frac{1}{3} E_{1}+\frac{2}{3} E_{2}"),
    (r"c^{2}(\gamma^{2}-7)", r"c^{2}(\gamma^{2}-1)"),
    ("GMm", "GMM"),
    ("x_1", "x_2"),
    ("4343_7", "4343_6"),
    ("4343", "4343_6"),
    (r"5 \pmod 7", "5"),
    (r"\begin{pmatrix} -1 & 3 \\ 0 & -1 \end{pmatrix}", r"\begin{pmatrix} -1 & 0 \\ 0 & -1 \end{pmatrix}"),
    (r"\begin{pmatrix}2\\1\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    (r"\sin^2 x", r"\sin x^2"),
    ("9^{9^{9}}", "5"),
]

# Equal for a reader, not for this grader. Each is the price of a rule that keeps false positives out.
FALSE_NEGATIVES = {
    "complex values are compared as letters": [(r"e^{i\pi}", "-1"), ("i", r"\sqrt{-1}")],
    "a pair needs its parentheses": [("1,2", "(1,2)")],
    "a base must be written": [("4343", r"4343_{\text{six}}")],
    "a one-letter unit outside \\text is a variable": [("5 m", "5")],
    "prose around the answer": [(r"\text{The answer is } 5", "5")],
    "approximation signs": [(r"\approx 5", "5")],
    "a choice with its value": [(r"\textbf{(B)}\ 12", "B")],
    "a mixed number may have been a product": [(r"4\frac{7}{27}", r"\frac{28}{27}")],
    "integrals and sums use other letters": [(r"\int_0^1 2x\,dx", "1")],
    "other names for one function": [("g(n)=n", "f(n)=n")],
    "radians and degrees": [(r"\frac{\pi}{2}", r"90^\circ")],
}


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch):
    for name in ("DISTILLED_RL_VERDICT", "DISTILLED_RL_GRADER_SECONDS"):
        monkeypatch.delenv(name, raising=False)


def score(answer: str, gold: object, **options) -> dict:
    return compute_score("math", rf"So the answer is \boxed{{{answer}}}.", gold, **options)


# ---- verdicts ----


@pytest.mark.parametrize(("answer", "gold"), RIGHT)
def test_right_answers_score_one(answer: str, gold: str):
    result = score(answer, gold)
    assert (result["score"], result["boxed"]) == (1.0, 1), result


@pytest.mark.parametrize(("answer", "gold"), WRONG)
def test_wrong_answers_score_zero_by_every_verdict(answer: str, gold: str):
    result = score(answer, gold)
    assert (result["score"], result["mathruler"], result["math_verify"], result["timeout"]) == (0.0, 0, 0, 0), result


@pytest.mark.parametrize(("answer", "gold"), [pair for pairs in FALSE_NEGATIVES.values() for pair in pairs])
def test_known_false_negatives(answer: str, gold: str):
    """If one of these turns right, it moves to RIGHT; it must never be a time-out."""
    result = score(answer, gold)
    assert (result["score"], result["timeout"], result["crash"]) == (0.0, 0, 0), result


def test_every_verdict_can_be_the_reported_one(monkeypatch: pytest.MonkeyPatch):
    # mathruler cannot read a binomial without losing its braces, math-verify can
    pair = (r"\binom{5}{2}", "10")
    both = score(*pair)
    assert (both["mathruler"], both["math_verify"], both["score"]) == (0, 1, 1.0)
    assert score(*pair, verdict="mathruler")["score"] == 0.0
    assert score(*pair, verdict="math_verify")["score"] == 1.0
    monkeypatch.setenv("DISTILLED_RL_VERDICT", "mathruler")
    assert score(*pair)["score"] == 0.0
    assert score(*pair, verdict="any")["score"] == 1.0  # the argument comes first


def test_an_unknown_verdict_is_refused():
    with pytest.raises(ValueError, match="unknown verdict 'both'"):
        score("5", "5", verdict="both")


def test_equal_texts_and_plain_numbers_need_no_child(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("distilled_rl.grading.shared_grader", lambda: pytest.fail("a child was asked"))
    pairs = {
        ("5", "5"): 1.0,
        ("4", "5"): 0.0,
        (r"x^{2}+1", "x^2 + 1"): 1.0,
        ("8.7e8", r"8.7\times 10^8"): 1.0,
        ("(1,2]", "(1,2)"): 0.0,
    }
    assert {pair: score(*pair)["score"] for pair in pairs} == pairs


# ---- extraction ----


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"\boxed{5}", "5"),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        (r"\boxed{1}, so \boxed{2", "1"),  # cut off: the last one that is closed
        (r"\boxed{1} is not \boxed{}", "1"),
        (r"\boxed{a = \boxed{5}}", "5"),
        (r"\boxed {5}", "5"),
        (r"\\boxed{5}", "5"),
        (r"\fbox{5}", "5"),
        ("}}{ \\boxed{5} }", "5"),
        ("The answer is 5.", None),
        (r"\boxed{5", None),
        (r"\boxed 5", None),
        ("", None),
    ],
)
def test_the_last_closed_box_is_the_answer(response: str, answer: str | None):
    assert extract(response) == answer


def test_without_a_box_nothing_is_right_unless_the_data_asks_for_an_answer_line():
    response = "Step one.\nAnswer: 7\nAnswer: $5$"
    assert compute_score("math", response, "5") == {**dict.fromkeys(KEYS, 0), "pred": ""}
    result = compute_score("math", response, "5", {"answer_format": "answer_line"})
    assert (result["score"], result["pred"], result["boxed"]) == (1.0, "5", 1)
    assert compute_score("math", "no line", "5", {"answer_format": "answer_line"})["boxed"] == 0
    assert compute_score("math", response, "5", {"answer_format": None})["boxed"] == 0  # a null column is the default
    with pytest.raises(ValueError, match="unknown answer format 'xml'"):
        compute_score("math", response, "5", {"answer_format": "xml"})


# ---- what verl gets ----


def test_keys_and_types_are_the_same_for_every_input():
    results = [
        score("5", "5"),
        score("4", "5"),
        score("x^2-1", "(x-1)(x+1)"),
        score("9^{9^{9^{9}}}", "5", seconds=0.2),
        score("\ud800", "5"),
        compute_score("math", "", "5"),
        compute_score("openai/gsm8k", r"\boxed{5}", 5, {"index": 3}),
        compute_score("miniature/chain", "9-0=9,9+1=0,0-0=0,0-6=4,4-5=9#9$", "9"),
        compute_score("miniature/chain", "nonsense", "9"),
    ]
    for result in results:
        assert {key: type(value) for key, value in result.items()} == KEYS
        json.dumps(result, ensure_ascii=False).encode("utf-8")  # verl writes such lines
    for key in KEYS:  # verl makes a column of each
        assert np.array([result[key] for result in results]).dtype.kind == {float: "f", int: "i", str: "U"}[KEYS[key]]


def test_verl_reads_validation_metrics_from_it():
    metric_utils = pytest.importorskip("verl.trainer.ppo.metric_utils")
    results = [score(answer, "5") for answer in ("5", "5", "4", "4")]
    columns = {key: [result[key] for result in results] for key in results[0]}
    metrics = metric_utils.process_validation_metrics(["math"] * 4, ["a", "a", "b", "b"], columns)["math"]
    assert metrics["acc"]["mean@2"] == 0.5
    assert metrics["acc"]["maj@2/mean"] == 0.5  # needs `pred`


def test_the_miniature_has_its_own_grader():
    right = compute_score("miniature/chain", "9-0=9,9+1=0,0-0=0,0-6=4,4-5=9#9$", "9", {"problem": "9-0+1-0-6-5"})
    assert (right["score"], right["pred"], right["boxed"]) == (1.0, "9", 1)
    assert compute_score("miniature/chain", r"\boxed{9}", "9")["score"] == 0.0


@pytest.mark.parametrize("gold", [5, 5.0, np.int64(5), np.float64(5.0), np.str_("5"), " 5 ", "5.0"])
def test_numbers_and_numpy_text_are_golds(gold: object):
    assert score("5", gold)["score"] == 1.0
    assert compute_score("math", np.str_(r"\boxed{5}"), gold)["score"] == 1.0


@pytest.mark.parametrize("gold", [None, True, ["5"], b"5", {"answer": "5"}])
def test_other_golds_are_type_errors(gold: object):
    with pytest.raises(TypeError, match="ground_truth must be a text or a number, not"):
        score("5", gold)


def test_other_responses_are_type_errors_and_an_empty_gold_is_refused():
    for response in (None, 5, b"5", ["5"]):
        with pytest.raises(TypeError, match="solution_str must be the decoded response"):
            compute_score("math", response, "5")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="ground_truth is empty"):
        score("5", "  ")


def test_importing_the_grader_imports_no_mathematics():
    code = "import sys, distilled_rl.grading; print(sorted({'sympy', 'math_verify', 'mathruler', 'torch'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.strip() == "[]"


# ---- hostile input ----

MEGABYTE = 1_000_000


@pytest.mark.parametrize(
    "response",
    [
        r"\boxed{" + "{" * 10_000 + "5" + "}" * 10_001,
        r"\boxed{" + "(" * 10_000 + "x" + ")" * 10_000 + "}",
        r"\boxed{" * (MEGABYTE // 7),
        r"\boxed{" + "x+" * (MEGABYTE // 2) + "1}",
        "{" * MEGABYTE,
        "}" * MEGABYTE,
        "\\" * MEGABYTE + "boxed{4}",
        "a" * MEGABYTE + r"\boxed{4}",
        r"\boxed{" + "9" * 1000 + "}",
        r"\boxed{10^{999999999}}",
        r"\boxed{1e999999999}",
        r"\boxed{" + "1," * 500 + "1}",
        r"\boxed{" + r"\text{a} \cdot " * 60 + "}",
        r"\boxed{" + r"\frac{1}{" * 19 + "x" + "}" * 19 + "}",
        "\\boxed{\ud800\udfff}",
        "\\boxed{x\ud800}",
        "\\boxed{\x00}",
        r"\boxed{__import__('os').abort()}",
        r"\boxed{100000000!}",
    ],
    ids=lambda response: f"{response[:24]!a}-{len(response)}",
)
def test_hostile_text_is_wrong_in_bounded_time(response: str):
    started, busy = time.monotonic(), time.process_time()
    result = compute_score("math", response, "x+5", seconds=1)
    assert result["score"] == 0.0
    assert time.process_time() - busy < 5  # the child has its own limit
    assert time.monotonic() - started < 60
    result["pred"].encode("utf-8")  # type: ignore[union-attr]


def test_endless_powers_are_killed_counted_and_leave_a_working_grader():
    started = time.monotonic()
    result = score("9^{9^{9^{9}}}", "5", seconds=0.5)
    assert (result["score"], result["timeout"], result["crash"]) == (0.0, 1, 0)
    assert time.monotonic() - started < pool.WALL_FACTOR * 0.5 + 5
    assert score("9^{9^{9}}", "5")["score"] == 0.0
    assert score("x^2-1", "(x-1)(x+1)")["score"] == 1.0


def test_the_limit_counts_processor_time_not_waiting():
    """A child that is stopped from outside uses none; only the wall-clock limit, four times as long, ends it."""
    with Grader() as grader:
        assert grader.judge([("x+1", "1+x")]).math_verify
        (pid,) = grader.child_pids()
        os.kill(pid, signal.SIGSTOP)
        started = time.monotonic()
        assert grader.judge([("x+2", "2+x")], seconds=0.25) == Verdicts(timeout=True)
        assert pool.WALL_FACTOR * 0.25 <= time.monotonic() - started < 10
        assert not _is_alive(pid)


def test_a_killed_child_is_replaced_and_the_answer_graded():
    with Grader() as grader:
        assert grader.judge([("x+1", "1+x")]) == Verdicts(True, True)
        (first,) = grader.child_pids()
        os.kill(first, signal.SIGKILL)
        assert grader.judge([("x+2", "2+x")]) == Verdicts(True, True)
        (second,) = grader.child_pids()
        assert first != second


def test_an_answer_that_kills_its_child_twice_is_a_crash(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    fragile = tmp_path / "worker.py"
    fragile.write_text("import sys, os\nprint('{\"ready\": true}', flush=True)\nsys.stdin.readline()\nos.abort()\n")
    monkeypatch.setattr(pool, "_WORKER", fragile)
    with Grader() as grader:
        assert grader.judge([("x", "y")]) == Verdicts(crash=True)
        assert grader.child_pids() == []


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    source = (
        Path(worker.__file__).read_text().replace("import mathruler.grader  #", "import mathruler_that_is_missing  #")
    )
    (tmp_path / "worker.py").write_text(source)
    monkeypatch.setattr(pool, "_WORKER", tmp_path / "worker.py")
    with Grader() as grader, pytest.raises(GraderError, match="mathruler_that_is_missing"):
        grader.judge([("x", "y")])


def test_an_answer_that_needs_too_much_memory_is_a_crash():
    def exhaust(*_: object) -> bool:
        raise MemoryError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "have_other_values", exhaust)
        assert worker.answer_request({"pairs": [["x", "y"]]}) == {"exhausted": "MemoryError"}


# ---- processes and threads ----


def test_threads_share_the_children_and_keep_their_answers_apart():
    pairs = [(f"(x+{n})^2", f"x^2+{2 * n}x+{n * n + n % 2}") for n in range(12)]  # odd n: wrong by one
    with Grader(workers=2) as grader, concurrent.futures.ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda pair: grade(canonical(pair[0]), canonical(pair[1]), grader=grader), pairs))
        assert [verdicts.math_verify for verdicts in found] == [n % 2 == 0 for n in range(12)]
        assert 1 <= len(grader.child_pids()) <= 2


def test_verdicts_are_remembered_but_time_outs_are_not():
    with Grader() as grader:
        pair = [("x+1", "1+x")]
        assert grader.judge(pair) == Verdicts(True, True)
        os.kill(grader.child_pids()[0], signal.SIGSTOP)
        assert grader.judge(pair) == Verdicts(True, True)
        other = [("x+2", "2+x")]
        assert grader.judge(other, seconds=0.1).timeout
        assert not grader.judge(other, seconds=5.0).timeout


def test_a_thread_that_ends_does_not_take_the_child_with_it():
    with Grader() as grader:
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            assert thread.submit(grader.judge, [("x+1", "1+x")]).result() == Verdicts(True, True)
        (pid,) = grader.child_pids()
        assert grader.judge([("x+2", "2+x")]) == Verdicts(True, True)
        assert grader.child_pids() == [pid]


def test_a_closed_grader_says_so_and_a_grader_needs_a_worker():
    grader = Grader()
    grader.close()
    with pytest.raises(GraderError, match="closed"):
        grader.judge([("x", "y")])
    with pytest.raises(ValueError, match="at least one worker"):
        Grader(workers=0)


SCRIPT = """
    import os, signal, sys, time
    from distilled_rl.grading import Grader
    grader = Grader()
    assert grader.judge([("x+1", "1+x")]).math_verify
    parent_children = grader.child_pids()
    if {fork}:
        child = os.fork()
        if child == 0:
            ok = grader.child_pids() == [] and grader.judge([("x+3", "3+x")]).math_verify
            ok = ok and grader.child_pids() != parent_children
            grader.close()
            os._exit(0 if ok else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert grader.judge([("x+4", "4+x")]).math_verify and grader.child_pids() == parent_children
    print(parent_children[0], flush=True)
    {end}
"""


@pytest.mark.parametrize(
    ("fork", "end"),
    [(True, ""), (False, "sys.exit(3)"), (False, "os._exit(0)"), (False, "os.kill(os.getpid(), signal.SIGKILL)")],
)
def test_children_end_with_their_parent_and_a_fork_gets_its_own(fork: bool, end: str):
    code = textwrap.dedent(SCRIPT).format(fork=fork, end=end)
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert found.stdout.strip().isdigit(), found.stderr
    deadline = time.monotonic() + 20
    while _is_alive(int(found.stdout)):
        assert time.monotonic() < deadline, "the grading process outlives its parent"
        time.sleep(0.05)


def test_a_busy_child_ends_after_its_parent_is_killed():
    code = "from distilled_rl.grading import Grader; g = Grader(); g.judge([('x+1', '1+x')]); print(g.child_pids()[0], flush=True)"
    code += "; g.judge([('9^{9^{9^{9}}}', '5')], 3.0)"
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    time.sleep(0.3)  # it is at the second answer now, or will be: either way it ends
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 60
    while _is_alive(child):
        assert time.monotonic() < deadline, "the grading process outlives its parent"
        time.sleep(0.05)


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


# ---- the benchmarks' own answers ----


def test_every_benchmark_answer_equals_itself():
    root = Path(os.environ.get("DISTILLED_RL_SHARED", Path(__file__).parents[3] / "shared"))
    files = sorted((root / "data/benchmarks").glob("*.jsonl"))
    if not files:
        pytest.skip(f"no benchmark files under {root}/data/benchmarks (set DISTILLED_RL_SHARED)")
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    assert len(rows) == 2995  # AIME 24-26, AMC23, BRUMO25, CMIMC25, GSM8K, HMMT25, MATH-500, Minerva, OlympiadBench
    assert [row["id"] for row in rows if decide(canonical(row["answer"]), canonical(row["answer"])) is not True] == []
    exponents = [row["answer"] for row in rows if row["data_source"] == "minerva" and "e" in row["answer"]]
    numbers = [answer for answer in exponents if canonical(answer).number is not None]
    assert len(numbers) == 58
    for answer in numbers:
        digits, power = answer.split("e")
        assert decide(canonical(rf"{digits} \times 10^{{{int(power)}}}"), canonical(answer)) is True
