"""Small models around a tokenizer: loadable, the same for the same seed, whole or not there at all."""

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from typer.testing import CliRunner

from distilled_rl import tiny_models
from distilled_rl.tiny_models import RECORD, SHAPES, Size, TinyModelError, build

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCABULARY = 320
CHAT = [{"role": "user", "content": "What is 1+1?"}]


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Tiny tensors on several threads spend their time waiting for a busy machine's other cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE of at most 300 tokens, with Qwen's special tokens and without a chat template."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["the answer is the sum of the numbers"] * 4, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    write_config(folder, {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"})
    return folder


def write_config(folder: Path, config: dict) -> None:
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("size", list(Size))
def test_a_model_loads_runs_and_stops_at_its_tokenizers_eos(tokenizer_dir: Path, tmp_path: Path, size: Size):
    out = tmp_path / "models" / size
    assert build(tokenizer_dir, out, size, seed=1, vocab_size=VOCABULARY)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    assert model.config.model_type == "qwen3" and model.dtype == torch.float32
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert (
        tokenizer.eos_token_id == 2 == model.config.eos_token_id == GenerationConfig.from_pretrained(out).eos_token_id
    )
    assert (
        tokenizer.pad_token_id == 0 == model.config.pad_token_id == GenerationConfig.from_pretrained(out).pad_token_id
    )
    ids = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    with torch.no_grad():
        logits = model(ids).logits
    assert logits.shape == (1, ids.shape[1], VOCABULARY) and bool(logits.isfinite().all())


def test_the_parameter_count_is_that_of_the_shape(tokenizer_dir: Path, tmp_path: Path):
    build(tokenizer_dir, tmp_path / "student", Size.STUDENT, seed=1, vocab_size=VOCABULARY)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "student")
    # embedding (tied); per layer: q and o 64x64, k and v 64x32, gate, up and down 64x192, four norms 64+64+32+32; last norm
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 192 + 192
    assert sum(p.numel() for p in model.parameters()) == VOCABULARY * 64 + 2 * layer + 64
    assert SHAPES[Size.TEACHER].hidden > SHAPES[Size.STUDENT].hidden


def test_one_seed_gives_the_same_bytes_and_leaves_torchs_generator_alone(tokenizer_dir: Path, tmp_path: Path):
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        build(tokenizer_dir, tmp_path / name, Size.STUDENT, seed=seed, vocab_size=VOCABULARY)
    assert torch.equal(torch.rand(1), expected)
    a, b, c = (digest(tmp_path / name / "model.safetensors") for name in "abc")
    assert a == b != c


def test_a_finished_model_is_left_alone_and_another_one_never_overwritten(tokenizer_dir: Path, tmp_path: Path):
    out = tmp_path / "student"
    assert build(tokenizer_dir, out, Size.STUDENT, seed=1, vocab_size=VOCABULARY) is True
    before = (out / "model.safetensors").stat().st_mtime_ns
    assert build(tokenizer_dir, out, Size.STUDENT, seed=1, vocab_size=VOCABULARY) is False
    assert (out / "model.safetensors").stat().st_mtime_ns == before
    with pytest.raises(TinyModelError, match="holds something else"):
        build(tokenizer_dir, out, Size.STUDENT, seed=2, vocab_size=VOCABULARY)
    (out / RECORD).write_text("{")
    with pytest.raises(TinyModelError, match="is damaged"):
        build(tokenizer_dir, out, Size.STUDENT, seed=1, vocab_size=VOCABULARY)


def test_a_failure_leaves_nothing_behind(tokenizer_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shutil, "copyfile", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        build(tokenizer_dir, tmp_path / "student", Size.STUDENT, seed=1, vocab_size=VOCABULARY)
    assert list(tmp_path.iterdir()) == []


def test_a_chat_template_is_added_only_where_there_is_none(tokenizer_dir: Path, tmp_path: Path):
    build(tokenizer_dir, tmp_path / "added", Size.STUDENT, seed=1, vocab_size=VOCABULARY)
    added = AutoTokenizer.from_pretrained(tmp_path / "added")
    rendered = added.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
    assert rendered == "<|im_start|>user\nWhat is 1+1?<|im_end|>\n<|im_start|>assistant\n"
    own = tmp_path / "tokenizer"
    shutil.copytree(tokenizer_dir, own)
    template = "{{ messages[0].content }}"
    write_config(own, {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": template})
    build(own, tmp_path / "own", Size.STUDENT, seed=1, vocab_size=VOCABULARY)
    assert AutoTokenizer.from_pretrained(tmp_path / "own").chat_template == template


def test_what_cannot_work_is_said_before_anything_is_written(tokenizer_dir: Path, tmp_path: Path):
    with pytest.raises(TinyModelError, match=r"has no tokenizer\.json"):
        build(tmp_path / "nowhere", tmp_path / "out", Size.STUDENT, seed=1)
    with pytest.raises(TinyModelError, match="a vocabulary of 100 is too small"):
        build(tokenizer_dir, tmp_path / "out", Size.STUDENT, seed=1, vocab_size=100)
    for missing in ("eos_token", "pad_token"):
        folder = tmp_path / missing
        shutil.copytree(tokenizer_dir, folder)
        tokens = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
        del tokens[missing]
        write_config(folder, tokens)
        with pytest.raises(TinyModelError, match=f"has no {missing}"):
            build(folder, tmp_path / "out", Size.STUDENT, seed=1, vocab_size=VOCABULARY)
    assert not (tmp_path / "out").exists()


def test_the_command_builds_finds_and_explains(tokenizer_dir: Path, tmp_path: Path):
    app = tiny_models.typer.Typer()
    app.command()(tiny_models.main)
    arguments = [
        "--tokenizer",
        str(tokenizer_dir),
        "--out",
        str(tmp_path / "m"),
        "--size",
        "teacher",
        "--vocab-size",
        "320",
    ]
    first, second = (CliRunner().invoke(app, arguments) for _ in range(2))
    assert (first.exit_code, second.exit_code) == (0, 0), first.output
    assert first.stdout.strip().startswith("wrote") and second.stdout.strip().startswith("found")
    other = CliRunner().invoke(app, [*arguments, "--seed", "9"])
    assert other.exit_code == 1 and "holds something else" in other.output


def test_the_real_tokenizer_gives_a_student_of_qwens_vocabulary(tmp_path: Path):
    root = Path(os.environ.get("DISTILLED_RL_SHARED", Path(__file__).parents[3] / "shared"))
    source = root / "data/tokenizer_qwen3"
    if not source.is_dir():
        pytest.skip(f"no tokenizer in {source} (set DISTILLED_RL_SHARED)")
    build(source, tmp_path / "student", Size.STUDENT, seed=1)
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(tmp_path / "student"),
        AutoTokenizer.from_pretrained(tmp_path / "student"),
    )
    assert sum(p.numel() for p in model.parameters()) == 151_936 * 64 + 2 * 49_344 + 64 == 9_822_656
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (151_645, 151_643)
    assert (model.config.eos_token_id, model.config.pad_token_id) == (151_645, 151_643)
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(source).chat_template
    assert digest(tmp_path / "student/tokenizer.json") == digest(source / "tokenizer.json")
    assert not (tmp_path / "student/chat_template.jinja").exists()
