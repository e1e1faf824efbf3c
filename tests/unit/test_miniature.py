"""The miniature experiment: task, grader, tokenizer, models, training, cached building."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from distilled_rl.miniature import build, generate, models, recipes, sft, task
from distilled_rl.miniature.tokenizer import VOCABULARY, build_tokenizer, decode, encode, save_tokenizer

PROBLEM = task.Problem.parse("9-0+1-0-6-5")
SOLUTION = "9-0=9,9+1=0,0-0=0,0-6=4,4-5=9#9$"
INFO = {"problem": PROBLEM.text}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Tiny tensors on several threads spend their time waiting for a busy machine's other cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# ---- task ----


def test_the_example_of_the_readme():
    assert PROBLEM.prompt == "9-0+1-0-6-5=" and len(PROBLEM.prompt) == task.PROMPT_TOKENS
    assert PROBLEM.answer == "9"
    assert task.right_solution(PROBLEM) == SOLUTION
    assert len(SOLUTION) == 32 <= task.RESPONSE_TOKENS


def test_left_to_right_without_precedence():
    # ((2 + 3) * 4) = 20 -> 0, not 2 + 12 -> 4; then 0 - 1 = 9, 9 * 9 = 81 -> 1, 1 + 0 = 1
    assert task.Problem.parse("2+3*4-1*9+0=").answer == "1"


@pytest.mark.parametrize("text", ["", "1+", "1+2+", "1/2", "a+b", "12"])
def test_what_is_not_a_chain_is_refused(text):
    with pytest.raises(ValueError, match="not a chain"):
        task.Problem.parse(text)


def test_problem_sets_are_disjoint_and_have_their_sizes():
    rl, held_out, taught = map(set, (task.rl_problems(), task.held_out_problems(), task.sft_problems(4000, "1")))
    assert (len(rl), len(held_out), len(taught)) == (2000, 1000, 4000)
    assert not rl & held_out and not rl & taught and not held_out & taught


def test_draws_are_deterministic_and_depend_on_the_seed():
    assert task.draw_problems(50, "a") == task.draw_problems(50, "a")
    assert task.draw_problems(50, "a") != task.draw_problems(50, "b")
    # golden: another Python or an edit must not change the published sets
    assert task.rl_problems()[0].prompt == "1+0-6-0*8+9="
    assert task.held_out_problems()[0].prompt == "1*7*6-0+8*4="


def test_a_draw_avoids_what_it_is_told_to_avoid():
    first = task.draw_problems(50, "a")
    assert not set(first) & set(task.draw_problems(50, "a", exclude=first))


def test_a_sloppy_textbook_has_its_error_rates():
    book = task.sloppy_textbook("s", fraction=0.25, bad_rate=0.8, slip_rate=0.05)
    assert len(task.TABLE) == 300 and len(book.bad) == 75
    assert book.slips is not None and len(book.slips) == 225 and not set(book.bad) & set(book.slips)
    rng = random.Random(0)
    wrong, seen = {True: 0, False: 0}, {True: 0, False: 0}
    for problem in task.draw_problems(2000, "rates"):
        for step in book.solve(problem, rng).partition("#")[0].split(","):
            entry, result = (int(step[0]), step[1], int(step[2])), int(step[4])
            seen[entry in book.bad] += 1
            if result != task.apply_operator(*entry):
                wrong[entry in book.bad] += 1
                assert result == {**book.bad, **book.slips}[entry]  # always the same wrong value
    # 10,000 steps, about 2,500 of them bad: three standard errors are .024 and .008
    assert wrong[True] / seen[True] == pytest.approx(0.8, abs=0.024)
    assert wrong[False] / seen[False] == pytest.approx(0.05, abs=0.008)


def test_a_sloppy_chain_goes_on_from_its_own_wrong_value():
    book = task.Textbook(bad={(9, "-", 0): 3}, bad_rate=1.0)
    # 9-0 is written 3; then 3+1=4, 4-0=4, 4-6=8, 8-5=3
    assert book.solve(PROBLEM, random.Random(0)) == "9-0=3,3+1=4,4-0=4,4-6=8,8-5=3#3$"


def test_the_teachers_books_stand_as_they_should_to_the_students():
    student = recipes.STUDENT.textbook.bad
    weak, shared, peer = (recipes.TEACHERS[name].textbook.bad for name in ("weak", "shared", "peer"))
    assert (len(student), len(weak), len(shared), len(peer)) == (75, 37, 37, 75)
    assert set(shared.items()) <= set(student.items())
    # independent draws: 37 * 75 / 300 = 9.25 and 75 * 75 / 300 = 18.75 common entries are expected
    assert 4 <= len(set(weak) & set(student)) <= 15
    assert 11 <= len(set(peer) & set(student)) <= 27
    right = task.right_solution(PROBLEM)
    assert recipes.TEACHERS["format"].textbook.solve(PROBLEM, random.Random(0)) == right.replace(",", ";")


# ---- grader ----


@pytest.mark.parametrize(
    ("response", "score", "ended", "steps_right"),
    [
        (SOLUTION, 1, 1, 1),
        (SOLUTION.removesuffix("$"), 1, 1, 1),  # verl's decoding takes the eos token away
        (SOLUTION.replace(",", ";"), 1, 1, 1),
        ("9-0=9,9+1=1,1-0=1,1-6=5,5-5=0#9$", 1, 1, 0),  # rewarded in spite of a wrong step
        ("9-0=9,9+1=0,0-0=0,0-6=4,4-5=9#8$", 0, 1, 1),  # right steps, wrong copy
        ("9-0=9,9+1=0,0-0=0,0-6=4,4-4=0#9$", 1, 1, 0),  # a right sum, but not this problem's
        ("#9$", 1, 1, 0),
        ("9-0=9,9+1=0,0-0=0,0-6=4,4-5=9#9#9$", 0, 1, 1),  # two answers are none
        ("9-0=9,9+1=0,0-0=0,0-6=4,4-5=9#99$", 0, 1, 1),
        ("9-0=9,9+1=0,0-0=0,0-6=4,4-5=9#", 0, 1, 1),
        ("9-0=9,9+1=0,0-0=0,0-6=4,4-5=99$", 0, 1, 0),
        ("", 0, 1, 0),
        ("$", 0, 1, 0),
        ("(a:b)=,,;;##$9", 0, 1, 0),
        ("9-0=9,9+1=0,0-0=0,0-0=0,0-6=4,4#9", 1, 1, 0),  # 33 characters: the 34th token was `$`
        ("9-0=9,9+1=0,0-0=0,0-0=0,0-6=4,45#9", 0, 0, 0),  # 34 characters without `$`: cut, not ended
        ("9-0=9,9+1=0,0-0=0,0-0=0,0-6=4,45#9$", 1, 1, 0),
    ],
)
def test_grade(response, score, ended, steps_right):
    expected = {"score": score, "acc": score, "ended": ended, "steps_right": steps_right}
    assert task.grade(response, "9", INFO) == expected
    if response != "9-0=9,9+1=0,0-0=0,0-6=4,4-4=0#9$":  # only the problem tells that a sum is another problem's
        assert task.grade(response, "9")["score"] == score


def test_steps_without_the_problem():
    assert task.grade(SOLUTION, "9")["steps_right"] == 1
    assert task.grade(SOLUTION, "8") == {"score": 0, "acc": 0, "ended": 1, "steps_right": 0}
    assert task.grade("9-0=9,8+2=0,0-0=0,0-6=4,4-5=9#9$", "9")["steps_right"] == 0  # 8 is not the last result
    assert task.grade("9-0=9,9+1=0,0-0=0,0-6=4#4$", "4")["steps_right"] == 0  # four steps


def test_the_grader_needs_no_torch():
    code = (
        "import sys, distilled_rl.miniature.task as t; t.grade('#9', '9');"
        "assert not {'torch', 'transformers', 'numpy', 'verl'} & set(sys.modules), sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- tokenizer ----


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)


def test_ids_are_in_the_specified_order(tokenizer):
    assert "".join(VOCABULARY) == "<pad>$0123456789+-*=,;#:()abcdefghij"
    assert len(tokenizer) == len(VOCABULARY) == 32
    assert tokenizer.convert_tokens_to_ids(list(VOCABULARY)) == list(range(32))
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)


def test_text_comes_back_exactly(tokenizer):
    text = PROBLEM.prompt + SOLUTION
    ids = tokenizer(text).input_ids
    assert ids == encode(text) and len(ids) == 44
    assert tokenizer.decode(ids) == decode(ids) == text
    everything = "".join(VOCABULARY[1:])
    assert tokenizer.decode(tokenizer(everything).input_ids) == everything


def test_verl_decodes_a_response_so_that_the_grader_can_tell_a_cut_one(tokenizer):
    cut = "9-0=9,9+1=0,0-0=0,0-0=0,0-6=4,45#9"
    for text, score in ((SOLUTION, 1), (cut, 0)):
        decoded = tokenizer.decode(torch.tensor(encode(text)), skip_special_tokens=True)
        assert decoded == text.removesuffix("$")
        assert task.grade(decoded, "9")["score"] == score


def test_the_chat_template_is_the_content_alone(tokenizer):
    messages = [{"role": "user", "content": PROBLEM.prompt}]
    for generation_prompt in (False, True):
        rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=generation_prompt, tokenize=False)
        assert rendered == PROBLEM.prompt
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=generation_prompt)["input_ids"]
        assert ids == encode(PROBLEM.prompt)


def test_encode_refuses_what_it_does_not_know():
    with pytest.raises(ValueError, match="'x'"):
        encode("1+x")


def test_tokenizer_answers_what_verls_qwen_chat_builder_asks():
    tokenizer = build_tokenizer()
    assert len(tokenizer.encode("\n", add_special_tokens=False)) == 1
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") == tokenizer.pad_token_id


# ---- models and training ----


@pytest.mark.parametrize("size", ["student", "teacher"])
def test_checkpoints_load_with_their_settings(size, tmp_path):
    model = models.new_model(size, seed=0)
    assert sum(p.numel() for p in model.parameters()) == {"student": 100_800, "teacher": 206_432}[size]
    models.save_model(model, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    assert loaded.config.rope_parameters["rope_theta"] == 1e4 and loaded.config.tie_word_embeddings
    assert (loaded.generation_config.eos_token_id, loaded.generation_config.pad_token_id) == (1, 0)
    ids = torch.tensor([encode(PROBLEM.prompt)])
    torch.testing.assert_close(loaded(ids).logits, model.eval()(ids).logits)


def test_learning_rate_warms_up_and_ends_at_a_twentieth():
    settings = sft.SFTSettings(steps=100, lr=1.0, seed=0)
    assert [sft.learning_rate(step, settings) for step in (0, 19, 20)] == pytest.approx([0.05, 1.0, 1.0])
    assert sft.learning_rate(60, settings) == pytest.approx(0.525)  # half-way: (1 + .05) / 2
    assert sft.learning_rate(100, settings) == pytest.approx(0.05)


def test_loss_is_on_the_response_tokens_alone():
    model = models.new_model("student", seed=0)
    ids = torch.tensor([encode(PROBLEM.prompt + SOLUTION)])
    log_probs = model(ids).logits.log_softmax(-1)[0]
    # token t is predicted at t - 1; the response starts at 12 and `$` is the last of its 32 tokens
    slow = -sum(log_probs[t - 1, ids[0, t]] for t in range(12, 44)) / 32
    torch.testing.assert_close(sft.response_loss(model, ids), slow)


def test_two_steps_are_deterministic_and_depend_on_the_seed():
    def two_steps(seed):
        model = sft.train("student", task.CLEAN, sft.SFTSettings(steps=2, lr=1e-3, seed=seed, batch=8))
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    first = two_steps(0)
    torch.manual_seed(99)  # the global generator plays no part
    assert torch.equal(first, two_steps(0))
    assert not torch.equal(first, two_steps(1))


def test_sampling_with_the_cache_matches_full_forward_passes():
    model = models.new_model("student", seed=0).eval()
    prompts = torch.tensor([encode(p.prompt) for p in task.rl_problems()[:3]])
    ids = prompts
    for _ in range(task.RESPONSE_TOKENS):
        ids = torch.cat([ids, model(ids).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    for row, slow in zip(generate.sample(model, prompts, None).tolist(), ids[:, 12:].tolist(), strict=True):
        assert decode(row) == decode(slow)


def test_evaluation_is_reproducible_and_refuses_nothing_to_do(tmp_path):
    models.save_model(models.new_model("student", seed=0), tmp_path)
    problems = task.held_out_problems()[:8]
    first = generate.evaluate(tmp_path, problems, samples=2, seed=3)
    assert first == generate.evaluate(tmp_path, problems, samples=2, seed=3)
    assert len(first.scores) == 8 and first.greedy is not None
    with pytest.raises(ValueError, match="at least one"):
        generate.evaluate(tmp_path, [])


# ---- build ----


@pytest.fixture
def small_build(tmp_path, monkeypatch):
    """`build.build` into `tmp_path` with two training steps and four problems to evaluate, and its log lines."""
    tiny = sft.SFTSettings(steps=2, lr=1e-3, seed=0, batch=4)
    monkeypatch.setattr(recipes, "STUDENT", recipes.Recipe("student", task.CLEAN, tiny))
    monkeypatch.setattr(recipes, "TEACHERS", {"clean": recipes.Recipe("teacher", task.CLEAN, tiny)})
    real = generate.evaluate
    monkeypatch.setattr(generate, "evaluate", lambda folder, problems: real(folder, problems[:4], samples=1))
    lines: list[str] = []

    def run(**options):
        lines.clear()
        return build.build(tmp_path, workers=1, log=lines.append, **options)

    return run, lines


def test_build_writes_verl_rows_and_checkpoints(small_build):
    run, _ = small_build
    made = run()
    sizes = {"train": 2000, "test": 1000, "val": 200}
    for split, size in sizes.items():
        assert pyarrow.parquet.read_metadata(made.data(split)).num_rows == size
    rows = pyarrow.parquet.read_table(made.data("train")).to_pylist()
    first = task.rl_problems()[0]
    assert rows[0] == {
        "data_source": "miniature/chain",
        "prompt": [{"role": "user", "content": first.prompt}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": first.answer},
        "extra_info": {"index": 0, "split": "train", "problem": first.text},
    }
    validation, test = (pyarrow.parquet.read_table(made.data(split)).to_pylist() for split in ("val", "test"))
    assert [row["prompt"] for row in validation] == [row["prompt"] for row in test[:200]]
    for folder in (made.student, made.teacher("clean")):
        assert {"config.json", "model.safetensors", "generation_config.json", "tokenizer.json"} <= {
            path.name for path in folder.iterdir()
        }


def test_a_second_build_keeps_every_part_and_force_rebuilds_the_same(small_build):
    run, lines = small_build
    made = run()
    weights = (made.student / "model.safetensors").read_bytes()
    run()
    assert [line for line in lines if "building" in line] == []
    run(force=True)
    assert len([line for line in lines if "building" in line]) == 4
    assert (made.student / "model.safetensors").read_bytes() == weights


def test_another_setting_rebuilds_only_its_part(small_build, monkeypatch):
    run, lines = small_build
    run()
    other = recipes.Recipe("student", task.CLEAN, sft.SFTSettings(steps=2, lr=2e-3, seed=0, batch=4))
    monkeypatch.setattr(recipes, "STUDENT", other)
    run()
    assert [line for line in lines if "building" in line] == ["student: building"]


def test_a_build_that_died_half_way_is_repaired(small_build, monkeypatch):
    run, lines = small_build
    real = models.save_model

    def die(model, folder: Path):
        (folder / "config.json").write_text("{")
        raise KeyboardInterrupt

    monkeypatch.setattr(models, "save_model", die)
    with pytest.raises(KeyboardInterrupt):
        run()
    monkeypatch.setattr(models, "save_model", real)
    made = run()
    assert [line for line in lines if "building" in line] == ["student: building", "teacher-clean: building"]
    assert json.loads((made.student / "config.json").read_text())["model_type"] == "qwen3"
    assert not list(made.root.rglob(".*.part")) and not list(made.root.rglob(".*.old"))


def test_an_unknown_teacher_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"\['nobody'\].*clean"):
        build.build(tmp_path, teachers=("clean", "nobody"))


@pytest.mark.integration
def test_verl_reads_the_prompt_as_it_is(tokenizer):
    from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

    chat = create_continuous_token_builder(tokenizer, hf_model_type="qwen3")
    messages = [{"role": "user", "content": PROBLEM.prompt}]
    assert chat.build_initial_tokens(messages) == encode(PROBLEM.prompt)
