"""The report on a teacher: every topic with every verdict it can have, and the command that prints it."""

# ruff: noqa: RUF001 - DeepSeek's special tokens are written with a full-width bar

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from distilled_rl.cli import app
from distilled_rl.config import ConfigError
from distilled_rl.teacher.compatibility import compare
from tests.unit.valid_run import VOCABULARY, write_model

# Qwen's added tokens by id, and what DeepSeek-R1-Distill-Qwen made of them (both from the published tokenizers).
QWEN = {
    151643: "<|endoftext|>",
    151644: "<|im_start|>",
    151645: "<|im_end|>",
    151646: "<|object_ref_start|>",
    151647: "<|object_ref_end|>",
    151648: "<|box_start|>",
    151649: "<|box_end|>",
}
QWEN3 = QWEN | {151667: "<think>", 151668: "</think>"}
R1_DISTILL = {
    151643: "<｜end▁of▁sentence｜>",
    151644: "<｜User｜>",
    151645: "<｜Assistant｜>",
    151646: "<｜begin▁of▁sentence｜>",
    151647: "<|EOT|>",
    151648: "<think>",
    151649: "</think>",
}
CHATML = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
THINKING = CHATML + (
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}"
)
ALWAYS_THINKING = CHATML + "{{- '<think>\n' }}"
PLAIN = "{% for message in messages %}{{ message.content }}{% endfor %}"


def write(folder, added=None, template=None, generation=None, tokenizer=None, **model):
    """A model folder with tokens added by id, a chat template, and the ids of a generation config."""
    write_model(folder, **model)
    if added:
        content = json.loads((folder / "tokenizer.json").read_text())
        content["added_tokens"] = [{"id": number, "content": token} for number, token in added.items()]
        (folder / "tokenizer.json").write_text(json.dumps(content))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    if tokenizer is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return folder


@pytest.fixture
def judge(tmp_path):
    """A function that writes a student and a teacher and returns the line of a topic."""

    def make(topic, student=None, teacher=None, **choices):
        folders = [write(tmp_path / name, **(values or {})) for name, values in (("s", student), ("t", teacher))]
        line = compare(*folders, **choices)[topic]
        assert line.topic == topic and line.found
        assert bool(line.advice) == (line.verdict != "same")
        return line

    return make


def qwen(**values):
    return {"added": QWEN3, "vocab_size": 151936, "eos": "<|im_end|>", "max_position_embeddings": 40960} | values


def r1_distill(**values):
    return {"added": R1_DISTILL, "vocab_size": 151936, "eos": "<｜end▁of▁sentence｜>"} | values


def test_equal_models_are_the_same_in_every_topic(tmp_path):
    folders = [write(tmp_path / name, template=THINKING, generation=1) for name in "st"]
    report = compare(*folders, prompt_length=16, response_length=34)
    assert [line.topic for line in report.lines] == (
        "tokens special_tokens eos vocab_size template thinking length architecture".split()
    )
    assert {line.verdict for line in report.lines} == {"same"}, report
    assert report.refused == ()


# ---- tokens ----


def test_tokens_with_other_ids_are_refused_whatever_is_allowed(judge):
    everything = ("eos", "special_tokens", "template")
    line = judge("tokens", teacher={"vocabulary": VOCABULARY | {"8": 11, "9": 10}}, allow=everything)
    assert line.verdict == "refuse"
    assert "2 of the student's 14 tokens have another id, or none, for the teacher ('8': 10 and 11" in line.found


def test_teacher_with_more_tokens_is_harmless(judge):
    line = judge("tokens", teacher={"vocabulary": VOCABULARY | {"-": 14}})
    assert line.verdict == "harmless" and "the teacher knows 1 more" in line.found


def test_every_id_is_inside_the_teachers_embedding(judge):
    # ids go up to 13: 14 rows hold them, 13 do not
    assert judge("tokens", teacher={"vocab_size": 14}).verdict == "same"
    line = judge("tokens", teacher={"vocab_size": 13})
    assert line.verdict == "refuse" and "highest token id is 13, the teacher's vocab_size 13" in line.found


def test_added_tokens_count_for_the_embedding_too(judge):
    line = judge("tokens", {"added": {40: "<a>"}}, {"added": {40: "<a>"}, "vocab_size": 40})
    assert line.verdict == "refuse" and "highest token id is 40" in line.found


def test_unigram_vocabularies_are_read(tmp_path):
    folders = [write(tmp_path / name) for name in "st"]
    for folder, pieces in zip(folders, (["$", "a", "b"], ["$", "b", "a"]), strict=True):
        content = {"model": {"type": "Unigram", "vocab": [[piece, -1.0] for piece in pieces]}}
        (folder / "tokenizer.json").write_text(json.dumps(content))
    assert "2 of the student's 3 tokens" in compare(*folders)["tokens"].found


# ---- special tokens ----


@pytest.mark.parametrize("r1", ["student", "teacher"])
def test_r1_distill_and_qwen3_are_refused_by_name(judge, r1):
    pair = (r1_distill(), qwen()) if r1 == "student" else (qwen(), r1_distill())
    assert judge("tokens", *pair).verdict == "same"
    line = judge("special_tokens", *pair)
    assert line.verdict == "refuse" and "put special_tokens into teacher.allow" in line.advice
    assert "DeepSeek-R1-Distill-Qwen re-uses ids 151646, 151648 and 151649" in line.found
    assert f"the {r1} is such a model" in line.found
    allowed = judge("special_tokens", *pair, allow=["special_tokens"])
    assert allowed.verdict == "allowed" and allowed.found == line.found


def test_exactly_the_three_ids_that_differ_are_special_tokens(judge):
    three = {number: R1_DISTILL[number] for number in (151646, 151648, 151649)}
    student = qwen(added=QWEN | three)
    assert judge("tokens", student, qwen()).verdict == "same"
    line = judge("special_tokens", student, qwen())
    assert (
        line.verdict == "refuse" and "re-uses ids" in line.found and "3 special or added token(s) differ" in line.found
    )
    assert "151646 is '<｜begin▁of▁sentence｜>' for the student, '<|object_ref_start|>' for the teacher" in line.found
    assert (
        "151648 is '<think>' for the student, '<|box_start|>' for the teacher (whose '<think>' is 151667)" in line.found
    )


def test_special_token_that_the_teacher_lacks(judge):
    line = judge("special_tokens", {"added": {20: "<a>", 21: "<b>"}}, {"added": {20: "<a>"}})
    assert line.verdict == "refuse" and "21 is '<b>' for the student, unknown to the teacher" in line.found
    assert "DeepSeek" not in line.found


def test_special_tokens_that_the_student_lacks_are_harmless(judge):
    line = judge("special_tokens", {"added": QWEN}, {"added": QWEN3})
    assert line.verdict == "harmless" and "the teacher knows 2 more" in line.found


def test_real_tokenizer_agrees_with_itself(shared_data, tmp_path):
    source = shared_data / "tokenizer_qwen3"
    if not (source / "tokenizer.json").is_file():
        pytest.skip(f"no tokenizer at {source}")
    config = {"model_type": "qwen3", "vocab_size": 151936, "max_position_embeddings": 40960}
    for name in "st":
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (tmp_path / name / file).symlink_to(source / file)
    report = compare(tmp_path / "s", tmp_path / "t", prompt_length=1024, response_length=8192)
    assert {line.verdict for line in report.lines} == {"same"}, report
    assert "151643 regular tokens have the same ids; the highest id is 151668" in report["tokens"].found
    # the same template from a file of its own, its last line ended: other text, equal prompts
    template = json.loads((source / "tokenizer_config.json").read_text())["chat_template"]
    (tmp_path / "t" / "chat_template.jinja").write_text(template + "\n")
    assert compare(tmp_path / "s", tmp_path / "t")["template"].verdict == "harmless"


# ---- end of text ----

BASE = qwen(eos="<|endoftext|>", generation=151643)
CHAT = qwen(generation=[151645, 151643])


@pytest.mark.parametrize("generation", [None, 151645, [151645, 151643]])
def test_base_student_and_chat_teacher_end_differently(judge, generation):
    # The chat model may stop at 151643 as well, but 151645 is what it learned to write.
    line = judge("eos", BASE, qwen(generation=generation))
    assert line.verdict == "refuse" and "never to stop" in line.advice
    assert "with token id 151643 ('<|endoftext|>'), the teacher with token id 151645 ('<|im_end|>')" in line.found
    assert ("may stop at 151643 too" in line.found) == (generation == [151645, 151643])
    assert judge("eos", BASE, qwen(generation=generation), allow=["eos"]).verdict == "allowed"
    assert judge("eos", BASE, qwen(generation=generation), allow=["template"]).verdict == "refuse"


def test_eos_map_makes_it_harmless(judge):
    line = judge("eos", BASE, CHAT, eos_map={151643: 151645})
    assert line.verdict == "harmless" and "151643 is scored as 151645" in line.found


def test_eos_map_to_an_id_that_is_no_end(judge):
    line = judge("eos", BASE, CHAT, eos_map={151643: 151644})
    assert (
        line.verdict == "refuse"
        and "eos_map has 151643:151644, but the teacher ends a text with token id 151645" in line.found
    )


def test_eos_map_of_an_id_that_is_not_the_students(judge):
    with pytest.raises(ConfigError, match="eos_map maps 7, but the student ends a text with 151643"):
        judge("eos", BASE, CHAT, eos_map={7: 151645})


def test_second_stop_id_of_the_student_is_harmless(judge):
    line = judge("eos", CHAT, qwen(generation=151645))
    assert line.verdict == "harmless" and "the student may stop at 151643 too, which the teacher does not" in line.found


def test_generation_config_that_leaves_out_the_tokenizers_eos(judge):
    # The student's generations stop at 13 as well, which its tokenizer does not say.
    line = judge("eos", {"generation": [13]}, {})
    assert line.verdict == "refuse" and "token id 13 ('=')" in line.found


@pytest.mark.parametrize("tokenizer", [{"eos_token": {"content": "="}}, {"eos_token": "="}])
def test_eos_token_may_be_an_object(judge, tokenizer):
    assert "the teacher with token id 13" in judge("eos", {}, {"tokenizer": tokenizer}).found


def test_eos_of_the_other_files(judge, tmp_path):
    line = judge("eos", {}, {"tokenizer": {}, "eos_token_id": 13})  # config.json
    assert line.verdict == "refuse" and "the teacher with token id 13" in line.found
    (tmp_path / "t" / "special_tokens_map.json").write_text(json.dumps({"eos_token": "$"}))
    assert compare(tmp_path / "s", tmp_path / "t")["eos"].verdict == "harmless"  # it has no pad


def test_tokenizer_without_pad_is_harmless(judge):
    line = judge("eos", {}, {"tokenizer": {"eos_token": "$"}})
    assert line.verdict == "harmless" and "pad_token is '<pad>' for the student, none for the teacher" in line.found


def test_no_known_end_is_said(judge):
    line = judge("eos", {}, {"tokenizer": {}})
    assert line.verdict == "harmless" and "the teacher's files name no end of text" in line.found


# ---- sizes ----


@pytest.mark.parametrize(("student", "teacher"), [(151936, 152064), (152064, 151936)])
def test_padded_vocabularies_are_harmless(judge, student, teacher):
    pair = qwen(vocab_size=student), qwen(vocab_size=teacher)
    line = judge("vocab_size", *pair)
    assert line.verdict == "harmless"
    assert f"the student's embedding has {student} rows, the teacher's {teacher}" in line.found
    assert judge("tokens", *pair).verdict == "same"


def test_exact_length_passes_and_one_less_is_refused(judge):
    lengths = {"prompt_length": 1024, "response_length": 8192}  # + 1 = 9217
    assert judge("length", teacher={"max_position_embeddings": 9217}, **lengths).verdict == "same"
    line = judge("length", teacher={"max_position_embeddings": 9216}, **lengths)
    assert line.verdict == "refuse" and "is 9217, the teacher's max_position_embeddings 9216" in line.found
    assert "shorten prompt or response by 1" in line.advice


@pytest.mark.parametrize("choices", [{}, {"prompt_length": 16, "response_length": 34}])
def test_length_that_is_not_known_is_said(judge, choices):
    positions = None if choices else 64
    assert judge("length", teacher={"max_position_embeddings": positions}, **choices).verdict == "harmless"


def test_architecture_is_for_information(judge):
    line = judge("architecture", {"torch_dtype": "bfloat16"}, {"dtype": "bfloat16", "model_type": "qwen2"})
    assert line.verdict == "harmless" and line.found == "model_type is qwen3 for the student, qwen2 for the teacher"
    line = judge("architecture", {"tie_word_embeddings": True}, {"tie_word_embeddings": False, "dtype": "float16"})
    assert "tie_word_embeddings is True" in line.found and "dtype is None for the student, float16" in line.found


# ---- chat template ----


def test_templates_of_other_text_and_equal_prompts_are_harmless(judge):
    line = judge("template", {"template": CHATML}, {"template": "{# the same #}" + CHATML})
    assert line.verdict == "harmless" and "the prompts of 4 probe conversations are equal" in line.found


def test_no_template_on_both_sides_is_the_same(judge):
    assert judge("template").verdict == "same"


@pytest.mark.parametrize("who", ["student", "teacher"])
def test_template_on_one_side_only(judge, who):
    sides = {"student": {"template": CHATML}, "teacher": {"template": CHATML}, who: {}}
    line = judge("template", **sides)
    assert line.verdict == "refuse" and f"the {who} has no chat template" in line.found
    assert judge("template", **sides, allow=["template"]).verdict == "allowed"
    own = judge("template", **sides, prompt="own")
    assert own.verdict == ("refuse" if who == "teacher" else "harmless")


def test_different_prompts_are_refused_with_the_first_different_character(judge):
    pair = {"template": CHATML}, {"template": CHATML.replace("im_end", "eot")}
    line = judge("template", *pair)
    # <|im_start|>user\nWhat is 1 + 1?<| : 12 + 5 + 14 + 2 characters before "im_end" and "eot"
    assert "for a user message, the prompts first differ at character 33: 'im_end|>" in line.found
    assert line.verdict == "refuse" and "put template into teacher.allow" in line.advice
    assert judge("template", *pair, allow=["template"]).verdict == "allowed"
    assert judge("template", *pair, prompt="own").verdict == "harmless"


def test_prompt_that_begins_the_other(judge):
    line = judge("template", {"template": PLAIN}, {"template": PLAIN + "!"})
    assert "differ at character 14: the end and '!'" in line.found


def test_template_that_refuses_a_system_message(judge):
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + PLAIN
    line = judge("template", {"template": PLAIN}, {"template": refusing})
    assert line.verdict == "refuse"
    assert "for a system and a user message, the teacher's template refuses to write a prompt" in line.found
    # two that refuse alike write equal prompts
    assert judge("template", {"template": refusing + "{##}"}, {"template": refusing}).verdict == "harmless"


def test_equal_texts_with_other_special_tokens(judge):
    pair = [{"template": "{{ eos_token }}" + PLAIN, "eos": eos} for eos in ("$", "=")]
    assert "first differ at character 0" in judge("template", *pair).found


def test_template_of_the_tokenizer_config_by_name(judge):
    named = [{"name": "tools", "template": "x"}, {"name": "default", "template": PLAIN}]
    for template in (PLAIN, named):
        assert judge("template", {"template": PLAIN}, {"tokenizer": {"chat_template": template}}).verdict != "refuse"


def test_what_transformers_gives_to_templates(judge):
    rich = "{% generation %}{{ messages | tojson }}{% endgeneration %}{{ strftime_now('%Y') }}{% break %}"
    rich = rich.replace("{% break %}", "{% for _ in [1, 2] %}{% break %}{% endfor %}")
    assert judge("template", {"template": rich}, {"template": rich + "{##}"}).verdict == "harmless"


def test_thinking_modes(judge):
    pair = {"template": THINKING}, {"template": CHATML}
    line = judge("thinking", *pair)
    assert line.verdict == "refuse" and "put template into teacher.allow" in line.advice
    assert "the student's template knows enable_thinking, the teacher's does not" in line.found
    assert "with enable_thinking=false" in line.found and "'<think>\\n\\n</think>\\n\\n'" in line.found
    assert judge("thinking", *pair, allow=["template"]).verdict == "allowed"
    # without the argument the prompts are equal, so the template's line names the probe
    assert "for a user message with enable_thinking=false, the prompts first differ" in judge("template", *pair).found


def test_thinking_block_that_only_one_template_opens(judge):
    line = judge("thinking", {"template": CHATML}, {"template": ALWAYS_THINKING})
    assert (
        "for a user message, the student's prompt ends with no thinking block, the teacher's with '<think>"
        in line.found
    )
    # its own prompt does not help: the response begins inside the teacher's block
    assert judge("thinking", {"template": CHATML}, {"template": ALWAYS_THINKING}, prompt="own").verdict == "refuse"


def test_other_templates_of_one_thinking_mode(judge):
    assert judge("thinking", {"template": CHATML}, {"template": PLAIN}).verdict == "same"
    pair = {"template": THINKING}, {"template": THINKING.replace("im_end", "eot")}
    assert judge("thinking", *pair).verdict == "same"


# ---- files and choices ----


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", None, "does not exist"),
        ("config.json", "{", "is not valid JSON"),
        ("config.json", "[]", "holds a list, not an object"),
        ("config.json", "{}", "has no vocab_size"),
        ("config.json", '{"vocab_size": "many"}', "vocab_size is 'many', not a whole number"),
        ("config.json", '{"vocab_size": 32, "eos_token_id": "1"}', "eos_token_id is '1'"),
        ("tokenizer.json", None, "does not exist"),
        ("tokenizer.json", "{", "is not valid JSON"),
        ("tokenizer.json", "{}", "holds no vocabulary"),
        ("tokenizer.json", '{"model": {"vocab": {}}}', "holds no vocabulary"),
        ("tokenizer.json", '{"model": {"vocab": {"a": "0"}}}', "holds no vocabulary"),
        ("tokenizer.json", '{"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 1}]}', "holds no vocabulary"),
        ("tokenizer_config.json", "{", "is not valid JSON"),
        ("tokenizer_config.json", '{"chat_template": 1}', "chat_template is a int"),
        ("generation_config.json", '{"eos_token_id": [true]}', "eos_token_id is"),
        ("special_tokens_map.json", "{", "is not valid JSON"),
        ("chat_template.jinja", "{% if %}", "the chat template is not valid, line 1"),
        ("chat_template.jinja", "{{ messages[0].content.nothing() }}", "cannot render a user message"),
        ("chat_template.jinja", "{{ ''.__class__.__mro__ }}", "cannot render a user message"),
    ],
)
def test_broken_file_is_named(tmp_path, name, content, message):
    student, teacher = (write(tmp_path / side, template=PLAIN) for side in "st")
    if name == "tokenizer_config.json":  # whose template a file of its own would replace
        (teacher / "chat_template.jinja").unlink()
    (teacher / name).unlink(missing_ok=True)
    if content is not None:
        (teacher / name).write_text(content)
    with pytest.raises(ConfigError) as caught:
        compare(student, teacher)
    assert str(teacher / name) in str(caught.value) and message in str(caught.value)


def test_choices_that_do_not_exist(tmp_path):
    with pytest.raises(ConfigError, match="names tokens, all: only eos, special_tokens, template can be allowed"):
        compare(tmp_path, tmp_path, allow=["tokens", "all"])
    with pytest.raises(ConfigError, match="is 'mine': must be student or own"):
        compare(tmp_path, tmp_path, prompt="mine")


def test_nothing_heavy_is_imported():
    code = (
        "import sys, distilled_rl.teacher.compatibility\n"
        "heavy = {'torch', 'verl', 'vllm', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], timeout=120, check=True)


# ---- the command ----


def check_teacher(*arguments):
    return CliRunner().invoke(app, ["check-teacher", *map(str, arguments)], env={"COLUMNS": "600"})


def test_command_on_a_teacher_that_fits(tmp_path):
    student, teacher = write(tmp_path / "s"), write(tmp_path / "t", hidden_size=96)
    result = check_teacher(student, teacher, "--max-prompt", 16, "--max-response", 47)  # + 1 = 64 positions
    assert result.exit_code == 0, result.output
    for topic in ("tokens", "special_tokens", "eos", "vocab_size", "template", "thinking", "length", "architecture"):
        assert topic in result.stdout
    assert "this teacher can score this student's responses" in result.stdout
    result = check_teacher(student, teacher, "--max-prompt", 16, "--max-response", 48)
    assert result.exit_code == 2 and "refused: length" in result.stderr


def test_command_refuses_until_it_is_allowed_or_mapped(tmp_path):
    student, teacher = write(tmp_path / "s", **BASE), write(tmp_path / "t", **CHAT)
    result = check_teacher(student, teacher)
    assert result.exit_code == 2 and "refused: eos" in result.stderr
    assert "the student ends a text with token id 151643" in result.stdout and "refuse" in result.stdout
    result = check_teacher(student, teacher, "--allow", "eos,template")
    assert result.exit_code == 0 and "allowed" in result.stdout
    result = check_teacher(student, teacher, "--eos-map", "151643:151645")
    assert result.exit_code == 0 and "151643 is scored as 151645" in result.stdout


def test_command_with_the_teachers_own_prompt(tmp_path):
    student, teacher = write(tmp_path / "s", template=CHATML), write(tmp_path / "t", template=PLAIN)
    assert check_teacher(student, teacher).exit_code == 2
    assert check_teacher(student, teacher, "--prompt", "own").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--allow", "everything"], "only eos, special_tokens, template can be allowed"),
        (["--eos-map", "1=2"], "'1=2' is no pair of token ids"),
        (["--max-prompt", "5"], "give both, or none"),
        (["--prompt", "mine"], "must be student or own"),
    ],
)
def test_command_with_a_wrong_choice(tmp_path, arguments, message):
    result = check_teacher(write(tmp_path / "s"), write(tmp_path / "t"), *arguments)
    assert result.exit_code == 2 and message in result.stderr


def test_command_on_hub_names(tmp_path, monkeypatch):
    student, teacher = write(tmp_path / "s"), write(tmp_path / "t")
    result = check_teacher(student, "nobody/no-such-model")  # the tests are offline
    assert result.exit_code == 2 and "not in the Hugging Face cache" in result.stderr
    monkeypatch.delenv("HF_HUB_OFFLINE")
    asked = []

    def download(name, allow_patterns):
        asked.append((name, allow_patterns))
        return str(teacher)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert check_teacher(student, "someone/model").exit_code == 0
    ((name, patterns),) = asked
    assert name == "someone/model" and "tokenizer.json" in patterns
    assert not [pattern for pattern in patterns if "safetensors" in pattern or "*" in pattern]

    def fail(name, allow_patterns):
        raise ConnectionError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    result = check_teacher(student, "someone/model")
    assert result.exit_code == 2 and "did not give its configuration and tokenizer" in result.stderr
    assert "no network" in result.stderr and "give the folder of the model" in result.stderr
