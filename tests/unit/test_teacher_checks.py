"""The rules on teachers: each source's own settings, several teachers routed by a data column, servers behind URLs."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from distilled_rl.checks import check_run
from distilled_rl.config import ConfigError
from distilled_rl.recipe import compose
from tests.unit.valid_run import PROMPT_LENGTH, RESPONSE_LENGTH, rows, write_model, write_parquet

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
NEEDED = PROMPT_LENGTH + RESPONSE_LENGTH  # 50
COLOCATED = {"teacher.source": "colocated", "teacher.enabled": False, "teacher.dtype": "bf16"}
TEMPERATURE = {
    "teacher.source": "temperature",
    "teacher.enabled": False,
    "teacher.model": None,
    "teacher.temperature": 0.6,
}
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def problems(config):
    """The problems that the checks find."""
    with pytest.raises(ConfigError) as caught:
        check_run(config)
    return [line.partition(". ")[2] for line in str(caught.value).splitlines()[1:]]


def refusal(config):
    (problem,) = problems(config)
    return problem


# ---- one teacher ----


def test_a_colocated_teacher_is_a_teacher(make_run):
    assert check_run(make_run(changes=COLOCATED)) == []
    # its log-probs are at the rollout temperature, as the student's are
    assert check_run(make_run(changes=COLOCATED | {f"{ROLLOUT}.temperature": 0.6})) == []


@pytest.mark.parametrize(
    ("changes", "needles"),
    [
        ({"teacher.enabled": True}, ["teacher.source is colocated", "two teachers", "teacher.enabled=false"]),
        ({"teacher.dtype": "int8"}, ["teacher.dtype is 'int8'", "fp32, bf16"]),
        ({"teacher.offload": "yes"}, ["teacher.offload is 'yes'", "true or false"]),
        ({"teacher.offload": False}, ["teacher.offload is false", "leave it true"]),
        (
            {f"{ACTOR}.strategy": "megatron"},
            [f"{ACTOR}.strategy is 'megatron'", "colocated teacher teacher needs fsdp"],
        ),
        ({"distilled_rl.score": "some"}, ["distilled_rl.score is 'some'", "needed, all"]),
        (
            {"teacher.source": "somewhere"},
            ["teacher.source is 'somewhere'", "server, url, colocated, temperature, several, none"],
        ),
        ({"teacher.model": None}, ["teacher.model is null", "set teacher.model=PATH"]),
        ({"teacher.model": "/nowhere/teacher"}, ["teacher.model: /nowhere/teacher does not exist"]),
        ({"distilled_rl": {"mode": "grpo"}}, ["mode 'grpo' uses no teacher", "add teacher=none"]),
        ({"teacher.eos_map": {7: 1}}, ["teacher.model: eos_map maps 7"]),
        ({"teacher.by_key": {"a": {"source": "url"}}}, ["teacher.by_key is given", "add teacher=several"]),
    ],
)
def test_colocated_teacher_refused(make_run, changes, needles):
    message = refusal(make_run(changes=COLOCATED | changes))
    assert all(needle in message for needle in needles), message


def test_a_colocated_teacher_that_is_off_loaded(make_run):
    assert check_run(make_run(changes=COLOCATED | {"teacher.offload": True})) == []


def test_heads_that_vllm_cannot_serve_on_a_cpu_are_no_matter_beside_the_student(make_run, tmp_path):
    teacher = write_model(tmp_path / "teacher", head_dim=16)
    assert check_run(make_run(changes=COLOCATED | {"teacher.model": str(teacher)})) == []


def test_a_broken_method_does_not_hide_a_broken_teacher(make_run):
    found = problems(make_run(changes=COLOCATED | {"teacher.dtype": "int8", "distilled_rl.eps_rho": 0.5}))
    assert len(found) == 2 and "distilled_rl.eps_rho is 0.5" in found[0] and "teacher.dtype is 'int8'" in found[1]


def test_no_teacher_beside_a_pool_of_servers(make_run):
    assert "teacher.source is none, but distillation.enabled" in refusal(make_run("opd", {"teacher.source": "none"}))


def test_the_student_at_another_temperature(make_run):
    assert check_run(make_run(changes=TEMPERATURE)) == []
    for value, needle in ((1.0, "would be the student itself"), (0, "must be > 0"), ("warm", "must be a number")):
        assert needle in refusal(make_run(changes=TEMPERATURE | {"teacher.temperature": value}))
    assert "two teachers" in refusal(make_run(changes=TEMPERATURE | {"teacher.enabled": True}))


@pytest.mark.parametrize(("key", "value"), [("eos_map", {1: 1}), ("prompt", "own")])
def test_the_student_reads_and_writes_as_itself(make_run, key, value):
    message = refusal(make_run(changes=TEMPERATURE | {f"teacher.{key}": value}))
    assert f"teacher.{key} is" in message and "this teacher is the student itself" in message


def test_colocated_teacher_with_too_few_positions(make_run, tmp_path):
    teacher = write_model(tmp_path / "teacher", max_position_embeddings=NEEDED - 1)
    message = refusal(make_run(changes=COLOCATED | {"teacher.model": str(teacher)}))
    assert f"teacher.model: max_position_embeddings is {NEEDED - 1}" in message
    teacher = write_model(tmp_path / "exact", max_position_embeddings=NEEDED)
    assert check_run(make_run(changes=COLOCATED | {"teacher.model": str(teacher)})) == []


@pytest.mark.parametrize("changes", [{}, COLOCATED])
def test_another_end_of_text_is_mapped(make_run, tmp_path, changes):
    changes = changes | {"teacher.model": str(write_model(tmp_path / "teacher", eos="="))}
    assert "the student ends a text with token id 1 ('$')" in refusal(make_run(changes=changes))
    assert check_run(make_run(changes=changes | {"teacher.eos_map": {1: 13}})) == []


@pytest.mark.parametrize("changes", [{}, COLOCATED])
def test_another_template_is_read_as_its_own(make_run, tmp_path, changes):
    teacher = write_model(tmp_path / "teacher")
    (teacher / "chat_template.jinja").write_text(TEMPLATE)
    changes = changes | {"teacher.model": str(teacher)}
    assert "the student has no chat template" in refusal(make_run(changes=changes))
    assert check_run(make_run(changes=changes | {"teacher.prompt": "own"})) == []


def test_verl_serves_what_the_teacher_node_names(make_run):
    changes = {"distillation.teacher_models.teacher_model.model_path": "/another"}
    message = refusal(make_run(changes=changes))
    assert "distillation.teacher_models would serve /another, but the teacher node names" in message


# ---- several teachers ----


@pytest.fixture
def several(assets, tmp_path):
    """A function ``(entries, *overrides)`` that composes a run on 32 problems each of algebra and geometry."""
    content = [{**row, "subject": ("algebra", "geometry")[number % 2]} for number, row in enumerate(rows(64))]
    train = write_parquet(tmp_path / "train.parquet", content)

    def make(entries, *overrides):
        base = [item for item in assets.overrides("distilled_rl") if not item.startswith("teacher")]
        nodes = [f"teacher.by_key.{key}={{{node}}}" for key, node in entries.items()]
        return compose(
            "distilled_rl",
            [*base, "teacher=several", "teacher.key=subject", *nodes, f"dataset.train={train}", *overrides],
        )

    return make


@pytest.fixture
def beside(assets):
    return f"source: colocated, model: {assets.root / 'teacher'}"


def test_several_teachers_of_all_kinds(several, beside, assets):
    served = f"source: server, model: {assets.root / 'teacher'}"
    for algebra in (served, beside, "source: temperature, temperature: 0.6"):
        assert check_run(several({"algebra": algebra, "geometry": f"{beside}, dtype: bf16, offload: true"})) == []
    assert check_run(several({"algebra": served, "geometry": served})) == []


@pytest.mark.parametrize(
    ("node", "needles"),
    [
        ("source: several", ["teacher.by_key.geometry.source is 'several'", "server, url, colocated, temperature"]),
        ("source: none", ["teacher.by_key.geometry.source is 'none'"]),
        ("source: server", ["teacher.by_key.geometry.model is null: set teacher.by_key.geometry.model=PATH"]),
        ("source: colocated", ["teacher.by_key.geometry.model is null"]),
        ("source: colocated, model: /nowhere/x", ["teacher.by_key.geometry.model: /nowhere/x does not exist"]),
        ("source: temperature", ["teacher.by_key.geometry.temperature is None", "must be a number"]),
        ("source: temperature, temperature: 1", ["teacher.by_key.geometry.temperature is 1", "student itself"]),
        ("BESIDE, dtype: int8", ["teacher.by_key.geometry.dtype is 'int8'"]),
        ("BESIDE, offload: 1", ["teacher.by_key.geometry.offload is 1"]),
        ("BESIDE, dtyp: fp32", ["teacher.by_key.geometry.dtyp means nothing", "did you mean dtype?"]),
        ("BESIDE, url: 'http://x'", ["teacher.by_key.geometry.url means nothing", "source colocated"]),
        ("BESIDE, allow: eos", ["teacher.by_key.geometry.allow is 'eos'", "teacher.by_key.geometry.allow=[eos]"]),
        ("BESIDE, allow: [all]", ["teacher.by_key.geometry: teacher.allow names all"]),
        ("BESIDE, eos_map: 3", ["teacher.by_key.geometry.eos_map is 3"]),
        ("BESIDE, eos_map: {7: 1}", ["teacher.by_key.geometry.model: eos_map maps 7"]),
        ("BESIDE, prompt: mine", ["teacher.by_key.geometry: teacher.prompt is 'mine'"]),
        ("BESIDE, name: algebra", ["teacher.by_key.algebra and teacher.by_key.geometry", "both called 'algebra'"]),
    ],
)
def test_an_entry_refused(several, beside, node, needles):
    message = refusal(several({"algebra": beside, "geometry": node.replace("BESIDE", beside)}))
    assert all(needle in message for needle in needles), message


def test_no_entries(several):
    message = refusal(several({}))
    assert "teacher.by_key is {}, which names no teacher" in message and "source: colocated" in message
    assert "teacher.by_key.algebra is 3: give a teacher's node" in refusal(several({}, "teacher.by_key.algebra=3"))


def test_the_column_has_to_be_named(several, beside):
    entries = {"algebra": beside, "geometry": beside}
    assert "teacher.key has no value (???)" in refusal(several(entries, "teacher.key=???"))
    assert "teacher.key is None: name the data column" in refusal(several(entries, "teacher.key=null"))
    message = refusal(several(entries, "teacher.key=topic"))
    assert "teacher.key is 'topic'" in message and "has no such column; it has data_source, prompt" in message


def test_values_without_a_teacher(several, beside):
    message = refusal(several({"algebra": beside, "logic": beside}))
    assert "the column subject (teacher.key) of data.train_files holds 'geometry' (32 rows)" in message
    assert "teacher.by_key knows algebra, logic" in message


def test_teacher_without_rows_is_a_warning(several, beside):
    (warning,) = check_run(several({"algebra": beside, "geometry": beside, "logic": beside}))
    assert "teacher.by_key.logic: no row of data.train_files has 'logic' in the column subject" in warning


def test_json_files_and_numbers_are_read_too(several, beside, tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text("\n".join(json.dumps({**row, "level": number % 2}) for number, row in enumerate(rows(64))))
    overrides = [f"dataset.train={path}", "teacher.key=level"]
    assert check_run(several({"0": beside, "1": beside}, *overrides)) == []
    assert "holds '1' (32 rows)" in refusal(several({"0": beside}, *overrides))


def test_remote_data_are_not_looked_at(several, beside):
    (warning,) = check_run(several({"algebra": beside}, "dataset.train=hdfs://cluster/train.parquet"))
    assert "its column subject (teacher.key) was not looked at" in warning


def test_several_teachers_beside_the_student_need_no_pool(several, beside):
    message = problems(several({"algebra": beside, "geometry": beside}, "distillation.enabled=true"))[0]
    assert "none of the teachers is served, but distillation.enabled is true" in message


def test_one_served_teacher_of_several_fixes_the_temperature(several, beside, assets):
    served = f"source: server, model: {assets.root / 'teacher'}"
    overrides = [f"{ROLLOUT}.temperature=0.6"]
    assert check_run(several({"algebra": beside, "geometry": beside}, *overrides)) == []
    message = refusal(several({"algebra": beside, "geometry": served}, *overrides))
    assert f"{ROLLOUT}.temperature is 0.6" in message and "set it to 1.0" in message


# ---- a teacher behind a URL ----


@pytest.fixture
def serve(assets):
    """A function that starts a server which offers one model, and returns its URL; it counts how often it is asked."""
    servers = []

    def start(**card):
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.server.asked += 1
                body = json.dumps({"data": [{"id": "teacher", "root": str(assets.root / "teacher"), **card}]}).encode()
                self.send_response(200)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.asked = 0
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}"

    start.servers = servers
    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def behind(assets):
    """A function ``(url, *overrides)`` that composes a run whose teacher is behind a URL."""

    def make(url, *overrides):
        base = [item for item in assets.overrides("distilled_rl") if not item.startswith("teacher")]
        return compose("distilled_rl", [*base, "teacher=url", f"teacher.url={url}", *overrides])

    return make


def test_a_teacher_behind_a_url(behind, serve, assets):
    assert check_run(behind(serve(max_model_len=NEEDED + 1))) == []
    assert serve.servers[0].asked == 1
    assert check_run(behind(serve(), f"teacher.model={assets.root / 'teacher'}")) == []


@pytest.mark.parametrize("url", ["null", "localhost:8000", "ftp://x"])
def test_url_that_is_none(behind, url):
    assert "teacher.url of the teacher url is" in refusal(behind(url))


def test_nobody_answers(behind):
    message = refusal(behind("http://127.0.0.1:9"))
    assert "no server answers for the teacher url at http://127.0.0.1:9" in message and "teacher.url" in message


def test_another_model_is_served(behind, serve, tmp_path):
    other = write_model(tmp_path / "other")
    message = refusal(behind(serve(), f"teacher.model={other}"))
    assert f"teacher.model is {other}, but the server at http://127.0.0.1:" in message and "serves teacher" in message


def test_a_copy_of_the_model_elsewhere_is_the_same(behind, serve, assets):
    url = serve(id="/models/teacher", root="/models/teacher")
    assert check_run(behind(url, f"teacher.model={assets.root / 'teacher'}")) == []
    (warning,) = check_run(behind(url))
    assert "the teacher url was not compared with the student" in warning
    assert "set teacher.model to a folder with them" in warning


def test_a_server_that_is_too_short(behind, serve):
    message = refusal(behind(serve(max_model_len=NEEDED)))
    assert f"max_model_len is {NEEDED}" in message and f"--max-model-len {NEEDED + 1}" in message


def test_a_served_teacher_that_does_not_fit(behind, serve, tmp_path):
    url = serve(root=str(write_model(tmp_path / "teacher", eos="=")))
    assert "teacher.url: the student ends a text with token id 1 ('$')" in refusal(behind(url))
    assert check_run(behind(url, "teacher.eos_map={1: 13}")) == []
    assert check_run(behind(url, "teacher.allow=[eos]")) == []


def test_own_prompt_behind_a_url_needs_the_tokenizer(behind, serve, tmp_path):
    teacher = write_model(tmp_path / "teacher")
    (teacher / "chat_template.jinja").write_text(TEMPLATE)
    url = serve(root=str(teacher))
    message = refusal(behind(url, "teacher.prompt=own"))
    assert "teacher.prompt is own, but teacher.model is null" in message and "set teacher.model=PATH" in message
    assert check_run(behind(url, "teacher.prompt=own", f"teacher.model={teacher}")) == []
    message = refusal(behind(url, "teacher.prompt=own", "teacher.model=/nowhere/teacher"))
    assert "needs the files of the teacher's tokenizer: teacher.model: /nowhere/teacher does not exist" in message


@pytest.mark.parametrize(
    ("override", "needles"),
    [
        ("teacher.timeout=0", ["teacher.timeout is 0", "seconds > 0"]),
        ("teacher.timeout=long", ["teacher.timeout is 'long'"]),
        ("teacher.retries=-1", ["teacher.retries is -1", "whole number >= 0"]),
        ("teacher.retries=1.5", ["teacher.retries is 1.5"]),
        (f"{ROLLOUT}.temperature=0.6", [f"{ROLLOUT}.temperature is 0.6", "set it to 1.0"]),
        (f"{ROLLOUT}.top_p=0.9", [f"{ROLLOUT}.top_p is 0.9"]),
        (f"{ROLLOUT}.top_k=20", [f"{ROLLOUT}.top_k is 20", "set it to -1"]),
        ("teacher.enabled=true", ["teacher.source is url, but distillation.enabled is true"]),
        ("teacher.prompt=mine", ["teacher.prompt is 'mine'"]),
    ],
)
def test_url_settings_refused(behind, serve, override, needles):
    sizes = ["distillation.n_gpus_per_node=1", "distillation.nnodes=1"]
    message = refusal(behind(serve(), override, *sizes))
    assert all(needle in message for needle in needles), message


def test_url_is_among_several(several, beside, serve):
    url = f"source: url, url: '{serve()}'"
    assert check_run(several({"algebra": beside, "geometry": url})) == []
    message = refusal(several({"algebra": beside, "geometry": f"{url}, model: /nowhere/other"}))
    assert "teacher.by_key.geometry.model is /nowhere/other, but the server at" in message
