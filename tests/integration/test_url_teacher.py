"""The teacher behind a URL against servers that answer as vLLM does, fail, or lie, and against a real ``vllm serve``."""

import contextlib
import json
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from distilled_rl.config import ConfigError
from distilled_rl.teacher import url
from distilled_rl.teacher.specs import TeacherSpec
from distilled_rl.teacher.url import Served, UrlTeacher, chunks, probe

pytestmark = pytest.mark.integration

Answer = tuple[int, Any] | tuple[int, Any, Mapping[str, str]]  # status, JSON or bytes, headers

# Prompt and response lengths of four rows.
PROMPTS, RESPONSES = [3, 1, 6, 2], [4, 9, 1, 12]
SEQUENCES = [
    torch.arange(j) * 7 % 50 + row + 100 for row, j in enumerate(map(sum, zip(PROMPTS, RESPONSES, strict=True)))
]


def log_prob(token: int, position: int) -> float:
    """A number that tells which token, and where it stands."""
    return -(position + token / 1024)


def choice(index: int, ids: list[int]) -> dict[str, Any]:
    """What vLLM answers to one prompt: null, then every token of it with its log-prob."""
    entries = [
        {str(token): {"logprob": log_prob(token, p), "rank": 1, "decoded_token": "x"}} for p, token in enumerate(ids)
    ]
    return {"index": index, "text": "x", "logprobs": None, "prompt_logprobs": [None, *entries[1:]]}


def completion(body: dict[str, Any]) -> dict[str, Any]:
    # last first: their order is told by `index`
    return {
        "object": "text_completion",
        "choices": [choice(index, ids) for index, ids in enumerate(body["prompt"])][::-1],
    }


@dataclass
class Server:
    """A local HTTP server. ``answers``: given the number of the request, from 1, and its JSON, what to answer, or None to close
    the connection without a word."""

    answers: Callable[[int, dict[str, Any]], Answer | None] = lambda number, body: (200, completion(body))
    models: Any = field(default_factory=lambda: {"data": [{"id": "big", "root": "/models/big", "max_model_len": 64}]})
    models_status: int = 200
    bodies: list[dict[str, Any]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)

    def start(self) -> None:
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), handler(self))
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()

    def die(self) -> None:
        """Stop listening."""
        self.http.shutdown()
        self.http.server_close()


def handler(server: Server) -> type[BaseHTTPRequestHandler]:
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # connections stay open

        def log_message(self, *_: Any) -> None:
            pass

        def reply(self, status: int, content: Any, headers: Mapping[str, str] | None = None) -> None:
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            for name, value in {**(headers or {}), "Content-Length": str(len(data))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            server.keys.append(self.headers.get("Authorization"))
            if self.path != "/v1/models":
                self.reply(404, {"detail": "Not Found"})
            else:
                self.reply(server.models_status, server.models)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path != "/v1/completions":
                return self.reply(404, {"detail": "Not Found"})
            with lock:
                server.bodies.append(body)
                server.times.append(time.monotonic())
                number = len(server.bodies)
            answer = server.answers(number, body)
            if answer is None:
                self.close_connection = True
            else:
                self.reply(*answer)

    return Handler


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setattr(url, "FIRST_PAUSE", 0.02)
    server = Server()
    server.start()
    yield server
    server.die()


def spec_of(where: str, **values: Any) -> TeacherSpec:
    return TeacherSpec(key=None, where="teacher", name="sage", source="url", url=where, **values)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def fails(teacher: UrlTeacher, kind: type[Exception], match: str, within: float = 3.0) -> str:
    """Assert that scoring fails in time with this error, which names the teacher and its URL; return its text."""
    started = time.monotonic()
    with pytest.raises(kind, match=match) as error:
        teacher.score(SEQUENCES)
    assert time.monotonic() - started < within
    assert error.type is kind
    assert f"the teacher sage at {teacher.url}" in str(error.value)
    return str(error.value)


def expected(sequence: torch.Tensor) -> list[float]:
    """Log-probs of tokens 1, 2, … as the server gives them."""
    return [log_prob(int(token), p) for p, token in enumerate(sequence)][1:]


def test_scores_are_those_of_verls_server_and_fall_on_the_response(
    verl_on_cpu: None, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    from distilled_rl.jagged import from_rows
    from distilled_rl.teacher.server import align_teacher_log_probs, server_fields

    monkeypatch.setattr(url, "REQUEST_TOKENS", 17)
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    teacher = UrlTeacher(spec_of(server.url))
    fields = teacher.score(SEQUENCES)
    # 7 + 10 = 17 tokens fit, then 7, then 14: three requests
    assert sorted(len(body["prompt"]) for body in server.bodies) == [1, 1, 2]
    settings = {"model": "big", "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
    assert all({name: body[name] for name in body if name != "prompt"} == settings for body in server.bodies)
    engine = from_rows([torch.tensor([*expected(sequence), 99.0]) for sequence in SEQUENCES])
    same: Any = server_fields(engine, from_rows(SEQUENCES))
    assert set(fields.keys()) == set(same.keys()) and fields.batch_size == same.batch_size
    for name in same.keys():
        mine: Any = fields[name]
        assert mine.dtype == same[name].dtype and torch.equal(mine.values(), same[name].values())
        assert torch.equal(mine.offsets(), same[name].offsets())
        assert (mine._get_min_seqlen(), mine._get_max_seqlen()) == (7, 14)
    responses = from_rows([sequence[n:] for sequence, n in zip(SEQUENCES, PROMPTS, strict=True)])
    mask = from_rows([torch.ones(n) for n in RESPONSES])
    aligned = align_teacher_log_probs(fields["teacher_logprobs"], fields["teacher_ids"], responses, mask)
    for row, sequence, prompt in zip(aligned.unbind(), SEQUENCES, PROMPTS, strict=True):
        torch.testing.assert_close(row, torch.tensor(expected(sequence)[prompt - 1 :]))
    teacher.score(SEQUENCES[:1])
    assert server.keys == ["Bearer secret"]  # the models are asked for once


def test_zeros_everywhere_are_placeholders(verl_on_cpu: None, server: Server) -> None:
    from distilled_rl.jagged import from_rows
    from distilled_rl.teacher.server import align_teacher_log_probs

    server.answers = changed(1, lambda entry, token: {token: {"logprob": 0.0}})
    fields = UrlTeacher(spec_of(server.url)).score(SEQUENCES)
    responses = from_rows([sequence[n:] for sequence, n in zip(SEQUENCES, PROMPTS, strict=True)])
    mask = from_rows([torch.ones(n) for n in RESPONSES])
    with pytest.raises(ValueError, match=r"response\(s\) \[1\] are all exactly 0"):
        align_teacher_log_probs(fields["teacher_logprobs"], fields["teacher_ids"], responses, mask)


@pytest.mark.parametrize("tail", ["", "/", "/v1", "/v1/"])
def test_the_url_may_end_in_v1(server: Server, tail: str) -> None:
    fields = UrlTeacher(spec_of(server.url + tail)).score(SEQUENCES[:1])
    assert fields["teacher_ids"].unbind()[0].flatten().tolist() == [*SEQUENCES[0].tolist()[1:], 0]
    assert probe(spec_of(server.url + tail)) == Served("big", "/models/big", 64)


def test_a_sequence_of_one_token_has_the_dummy_only(server: Server) -> None:
    fields = UrlTeacher(spec_of(server.url)).score([torch.tensor([5]), torch.tensor([6, 7], dtype=torch.int32)])
    assert [row.flatten().tolist() for row in fields["teacher_ids"].unbind()] == [[0], [7, 0]]
    assert [row.flatten().tolist() for row in fields["teacher_logprobs"].unbind()] == [
        [0.0],
        [*expected(torch.tensor([6, 7])), 0.0],
    ]
    with pytest.raises(ValueError, match=r"empty sequence \(number 1\)"):
        UrlTeacher(spec_of(server.url)).score([torch.tensor([5]), torch.tensor([], dtype=torch.int64)])


@pytest.mark.parametrize(
    ("lengths", "wanted"),
    [
        ([], []),
        ([5], [[0]]),
        ([5, 5, 1], [[0, 1], [2]]),
        ([30, 1, 2], [[0], [1, 2]]),
        ([1, 30, 10], [[0], [1], [2]]),
    ],
)
def test_requests_hold_whole_rows_within_their_limit(lengths: list[int], wanted: list[list[int]]) -> None:
    assert [list(chunk) for chunk in chunks(lengths, 10)] == wanted


# --- servers that fail -----------------------------------------------------------------------------------------------------


def test_two_failures_are_forgiven(server: Server) -> None:
    server.answers = lambda number, body: (
        (500, {"error": {"message": "busy"}}) if number < 3 else (200, completion(body))
    )
    fields = UrlTeacher(spec_of(server.url, retries=2)).score(SEQUENCES)
    assert len(server.bodies) == 3
    assert fields["teacher_logprobs"].unbind()[1].flatten().tolist() == pytest.approx([*expected(SEQUENCES[1]), 0])


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_a_server_that_always_fails_is_given_up(server: Server, status: int) -> None:
    server.answers = lambda number, body: (status, {"error": {"message": "engine is dead"}})
    fails(UrlTeacher(spec_of(server.url, retries=2)), RuntimeError, rf"HTTP {status}: engine is dead.* 3 attempt\(s\)")
    assert len(server.bodies) == 3


def test_pauses_grow_and_many_retries_end_in_time(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(url, "FIRST_PAUSE", 0.1)
    monkeypatch.setattr(url, "GIVE_UP_AFTER", 1.2)
    server.answers = lambda number, body: (500, b"")
    fails(UrlTeacher(spec_of(server.url, timeout=0.5, retries=10**6)), RuntimeError, "without a message; gave up", 2.0)
    pauses = [later - earlier for earlier, later in zip(server.times, server.times[1:], strict=False)]
    # 0.1 s, doubled each time, of which jitter leaves at least half
    assert len(pauses) >= 2 and all(pause >= 0.05 * 2**n for n, pause in enumerate(pauses))


def test_with_the_defaults_nothing_listening_ends_within_a_minute() -> None:
    # Each of the retries waits at most twice as long as the one before: 1 + 2 + 4 + 8 s. The deadline holds for any of them.
    spec = spec_of(f"http://127.0.0.1:{free_port()}")
    pauses = sum(min(url.FIRST_PAUSE * 2**n, url.LONGEST_PAUSE) for n in range(spec.retries))
    assert pauses < 60 and max(url.GIVE_UP_AFTER, spec.timeout) <= 60
    fails(UrlTeacher(spec), RuntimeError, r"ConnectError.* 5 attempt\(s\)", within=pauses + 10)


def test_a_server_that_dies_in_the_middle(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(url, "REQUEST_TOKENS", 1)
    monkeypatch.setattr(url, "CONCURRENCY", 1)

    def answers(number: int, body: dict[str, Any]) -> Answer | None:
        if number == 3:
            server.die()
            return None
        return 200, completion(body)

    server.answers = answers
    fails(UrlTeacher(spec_of(server.url, retries=3)), RuntimeError, "ConnectError")
    assert len(server.bodies) == 3


def test_a_connection_that_breaks_is_tried_again(server: Server) -> None:
    server.answers = lambda number, body: None if number == 1 else (200, completion(body))
    UrlTeacher(spec_of(server.url)).score(SEQUENCES)
    assert len(server.bodies) == 2


def test_a_slow_server(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = {1}

    def answers(number: int, body: dict[str, Any]) -> Answer:
        if number in slow:
            time.sleep(1.5)
        return 200, completion(body)

    server.answers = answers
    UrlTeacher(spec_of(server.url, timeout=0.4)).score(SEQUENCES)  # the second attempt is in time
    assert len(server.bodies) == 2
    slow |= {3, 4}
    fails(
        UrlTeacher(spec_of(server.url, timeout=0.4, retries=1)),
        RuntimeError,
        r"no answer within 0\.\d+ s \(raise teacher.timeout",
    )
    # All attempts together: the third is cut short, or not begun.
    slow |= set(range(5, 99))
    monkeypatch.setattr(url, "GIVE_UP_AFTER", 1.0)
    fails(UrlTeacher(spec_of(server.url, timeout=0.4, retries=50)), RuntimeError, "no answer within", within=1.5)


def test_a_server_that_drips_is_slow(server: Server) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def drip() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n")
                with contextlib.suppress(OSError):  # the client has gone
                    for _ in range(30):
                        time.sleep(0.1)
                        connection.sendall(b" ")

        threading.Thread(target=drip, daemon=True).start()
        where = f"http://127.0.0.1:{listener.getsockname()[1]}"
        fails(UrlTeacher(spec_of(where, timeout=0.5, retries=0)), RuntimeError, "no answer within 0.5 s", within=1.5)


def test_a_refusal_is_final_and_stops_the_other_requests(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(url, "REQUEST_TOKENS", 1)

    def answers(number: int, body: dict[str, Any]) -> Answer:
        if len(body["prompt"][0]) == 14:
            return 400, {"error": {"message": "This model's maximum context length is 8 tokens.", "code": 400}}
        time.sleep(2.5)
        return 200, completion(body)

    server.answers = answers
    text = fails(
        UrlTeacher(spec_of(server.url)), RuntimeError, "HTTP 400: This model's maximum context length", within=2.0
    )
    assert "has 14 tokens" in text and "--max-model-len of at least 15, where it has 64" in text
    assert sum(len(body["prompt"][0]) == 14 for body in server.bodies) == 1


@pytest.mark.parametrize(
    ("status", "content", "match"),
    [
        (401, {"error": "Unauthorized"}, "HTTP 401: Unauthorized.*OPENAI_API_KEY"),
        (404, {"error": {"message": "The model `big` does not exist."}}, "does not exist.*still serves this model"),
        (422, {"detail": "bad field"}, "HTTP 422: bad field"),
        (302, b"<html>moved</html>", "HTTP 302: <html>moved"),
    ],
)
def test_other_refusals(server: Server, status: int, content: Any, match: str) -> None:
    server.answers = lambda number, body: (status, content)
    fails(UrlTeacher(spec_of(server.url)), RuntimeError, match)
    assert len(server.bodies) == 1


def test_what_vllm_answers_when_it_computed_a_nan(server: Server) -> None:
    # The ValueError of json.dumps(allow_nan=False) in starlette's JSONResponse comes out as vLLM's error 400.
    with pytest.raises(ValueError, match="not JSON compliant") as error:
        json.dumps([math.nan], allow_nan=False)
    server.answers = lambda number, body: (400, {"error": {"message": str(error.value)}})
    fails(UrlTeacher(spec_of(server.url)), ValueError, "computed a log-prob that is no number")


@pytest.mark.parametrize(
    ("asked", "cap", "least", "most"), [("0.5", 30.0, 0.5, 1.5), ("3600", 0.3, 0.3, 1.5), ("soon", 30.0, 0.0, 0.4)]
)
def test_a_server_that_asks_for_patience(
    server: Server, monkeypatch: pytest.MonkeyPatch, asked: str, cap: float, least: float, most: float
) -> None:
    monkeypatch.setattr(url, "LONGEST_RETRY_AFTER", cap)
    headers = {"Retry-After": asked}
    server.answers = lambda number, body: (429, {}, headers) if number == 1 else (200, completion(body))
    UrlTeacher(spec_of(server.url)).score(SEQUENCES)
    assert least <= server.times[1] - server.times[0] < most


def test_patience_beyond_the_deadline_is_not_had(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(url, "GIVE_UP_AFTER", 1.0)
    server.answers = lambda number, body: (503, {"error": "later"}, {"Retry-After": "20"})
    fails(
        UrlTeacher(spec_of(server.url, timeout=1.0)), RuntimeError, r"later; gave up after 1 attempt\(s\)", within=1.0
    )


# --- servers that lie ------------------------------------------------------------------------------------------------------


def changed(row: int, change: Callable[[Any, str], Any], where: slice | int = slice(1, None)) -> Any:
    """Return the right answers with ``change(entry, token)`` at these positions of one row."""

    def answers(number: int, body: dict[str, Any]) -> Answer:
        answer, positions = completion(body), range(len(body["prompt"][row]))[where]
        [chosen] = [choice for choice in answer["choices"] if choice["index"] == row]
        for p in positions if isinstance(positions, range) else [positions]:
            chosen["prompt_logprobs"][p] = change(chosen["prompt_logprobs"][p], str(body["prompt"][row][p]))
        return 200, answer

    return answers


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (math.nan, "nan"),
        (math.inf, "inf"),
        (-math.inf, "-inf"),
        (-9999.0, "-9999, which stands for -inf,"),
        (None, "null"),
        (-1e300, "-1e[+]300"),
        (12.5, "12.5"),
    ],
)
def test_values_that_are_no_log_probs(server: Server, value: float | None, shown: str) -> None:
    server.answers = changed(2, lambda entry, token: {token: {"logprob": value, "rank": 1}}, where=4)
    token = int(SEQUENCES[2][4])
    fails(
        UrlTeacher(spec_of(server.url)),
        ValueError,
        rf"the log-prob {shown} for position 4 of sequence 2 \(token {token}; 1 such value",
    )
    assert len(server.bodies) == 1  # wrong content stays wrong


def test_smallest_and_largest_log_probs_are_numbers(server: Server) -> None:
    server.answers = changed(0, lambda entry, token: {token: {"logprob": -9998.5}}, where=1)
    UrlTeacher(spec_of(server.url)).score(SEQUENCES)
    server.answers = changed(0, lambda entry, token: {token: {"logprob": 0}}, where=1)
    assert UrlTeacher(spec_of(server.url)).score(SEQUENCES)["teacher_logprobs"].unbind()[0][0] == 0


def test_answers_beside_the_prompts_own_token_are_left_alone(server: Server) -> None:
    server.answers = changed(1, lambda entry, token: {"1": {"logprob": -0.1}, **entry}, where=3)
    fields = UrlTeacher(spec_of(server.url)).score(SEQUENCES)
    assert fields["teacher_logprobs"].unbind()[1].flatten().tolist() == pytest.approx([*expected(SEQUENCES[1]), 0])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            lambda entry, token: {"7": {"logprob": -1.0}},
            "the token ids 7 for position 5 of sequence 3, where .* another tokenizer",
        ),
        (lambda entry, token: {}, r"the token ids \(none\) for position 5 of sequence 3"),
        (lambda entry, token: None, "null for position 5 of sequence 3: it must score the whole prompt"),
        (lambda entry, token: {token: {"rank": 1}}, "something else than a completion.*`logprob`"),
        (lambda entry, token: {token: {"logprob": "-1"}}, "something else than a completion.*Expected `float"),
    ],
)
def test_positions_that_hold_something_else(server: Server, change: Any, match: str) -> None:
    server.answers = changed(3, change, where=5)
    fails(UrlTeacher(spec_of(server.url)), ValueError, match)


def rows(change: Callable[[dict[str, Any]], Any]) -> Any:
    """Return the right answers with ``change`` done to the choice of row 1."""

    def answers(number: int, body: dict[str, Any]) -> Answer:
        answer = completion(body)
        change(next(choice for choice in answer["choices"] if choice["index"] == 1))
        return 200, answer

    return answers


@pytest.mark.parametrize(
    ("answers", "match"),
    [
        (rows(lambda choice: choice["prompt_logprobs"].pop()), "9 positions for sequence 1 of 10 tokens"),
        (rows(lambda choice: choice["prompt_logprobs"].append({})), "11 positions for sequence 1 of 10 tokens"),
        (rows(lambda choice: choice.update(prompt_logprobs=[])), "0 positions for sequence 1 of 10 tokens"),
        (rows(lambda choice: choice.pop("prompt_logprobs")), "without prompt_logprobs: only vLLM's own"),
        (rows(lambda choice: choice.update(index=2)), r"choices numbered \[0, 2, 2, 3\] to 4 prompt"),
        (
            changed(1, lambda entry, token: {token: {"logprob": -1.0}}, where=0),
            "a log-prob of the first token of sequence 1",
        ),
        (lambda number, body: (200, {"choices": []}), r"choices numbered \[\] to 4 prompt"),
        (
            lambda number, body: (200, {"data": []}),
            "something else than a completion.*missing required field `choices`",
        ),
        (lambda number, body: (200, b"<html>Welcome to nginx!</html>"), "something else.*no JSON but '<html>Welcome"),
        (lambda number, body: (200, b"\xff\xfe\x00"), "something else than a completion"),
        (lambda number, body: (200, b""), "something else than a completion.*no JSON but ''"),
        (lambda number, body: (200, b"[NaN, 1]"), "something else than a completion.*Expected `object`"),
    ],
)
def test_answers_of_another_shape(server: Server, answers: Any, match: str) -> None:
    server.answers = answers
    fails(UrlTeacher(spec_of(server.url)), ValueError, match)
    assert len(server.bodies) == 1


# --- which model -----------------------------------------------------------------------------------------------------------

TWO = {
    "data": [
        {"id": "base", "root": "/models/big"},
        {"id": "/models/big", "root": "/adapters/one"},
        {"id": "lora", "root": "/adapters/two"},
    ]
}


@pytest.mark.parametrize(
    ("model", "asked"),
    [
        ("base", "base"),
        ("lora", "lora"),
        ("/adapters/two/", "lora"),
        ("/models/big", "/models/big"),
        ("/adapters/one", "/models/big"),
    ],
)
def test_of_several_models_the_teachers_is_asked(server: Server, model: str, asked: str) -> None:
    server.models = TWO
    UrlTeacher(spec_of(server.url, model=model)).score(SEQUENCES)
    assert server.bodies[0]["model"] == asked and probe(spec_of(server.url, model=model)).id == asked


@pytest.mark.parametrize("model", [None, "/models/other"])
def test_several_models_none_of_which_is_the_teachers(server: Server, model: str | None) -> None:
    server.models = TWO
    match = r"serves base \(from /models/big\), .*, lora \(from /adapters/two\), not .*set teacher.model"
    with pytest.raises(ConfigError, match=match):
        probe(spec_of(server.url, model=model))
    with pytest.raises(ValueError, match=match):
        UrlTeacher(spec_of(server.url, model=model)).score(SEQUENCES)
    assert server.bodies == []


def test_the_only_model_is_asked_by_whatever_name(server: Server) -> None:
    assert probe(spec_of(server.url, model="elsewhere/big")) == Served("big", "/models/big", 64)


# --- before the run --------------------------------------------------------------------------------------------------------


def test_probe_without_a_server(server: Server) -> None:
    started = time.monotonic()
    with pytest.raises(
        ConfigError, match=r"no server answers for the teacher sage.*vllm serve /models/big.*correct teacher.url"
    ):
        probe(spec_of(f"http://127.0.0.1:{free_port()}", model="/models/big"))
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(ConfigError, match="ReadTimeout"):
        probe(spec_of(f"http://127.0.0.1:{silent.getsockname()[1]}"), timeout=0.3)
    assert time.monotonic() - started < 3


@pytest.mark.parametrize(
    ("status", "models", "match"),
    [
        (200, b"<html>hi</html>", "no OpenAI-style server.*no JSON but '<html>hi"),
        (200, {"models": []}, "no OpenAI-style server.*missing required field `data`"),
        (200, {"data": [{"name": "x"}]}, "no OpenAI-style server"),
        (200, {"data": []}, "serves no model, not one model only"),
        (404, {"detail": "Not Found"}, r"HTTP 404 \(Not Found\): it is no OpenAI-style server"),
        (401, {"error": "Unauthorized"}, "wants a key.*OPENAI_API_KEY"),
    ],
)
def test_probe_of_something_else(server: Server, status: int, models: Any, match: str) -> None:
    server.models, server.models_status = models, status
    with pytest.raises(ConfigError, match=match) as error:
        probe(spec_of(server.url))
    assert "sage" in str(error.value) and server.url in str(error.value)


@pytest.mark.parametrize("text", [None, "", "localhost:8000", "ftp://host", "http://", "http://host:port"])
def test_what_is_no_url(text: str | None) -> None:
    spec = replace(spec_of("http://x"), url=text)
    for ask in (probe, UrlTeacher):
        with pytest.raises(ConfigError, match=r"teacher\.url of the teacher sage is .*give that of a vLLM server"):
            ask(spec)


# --- the real one ----------------------------------------------------------------------------------------------------------


def test_a_real_server_scores_as_the_model_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from distilled_rl.launch import CPU_ENVIRONMENT, QUIET_ENVIRONMENT
    from distilled_rl.miniature.models import load_model, new_model, save_model
    from distilled_rl.processes import Watched

    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    save_model(new_model("teacher", seed=1), tmp_path / "teacher")
    model = load_model(tmp_path / "teacher")
    port, log = free_port(), tmp_path / "server.log"
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(tmp_path / "teacher")),
        *(
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "--served-model-name",
            "tiny",
            "--dtype",
            "float32",
            "--enforce-eager",
        ),
        *("--max-model-len", "64", "--max-num-seqs", "8", "--kv-cache-memory-bytes", str(64 * 2**20)),
    ]
    spec = spec_of(f"http://127.0.0.1:{port}/v1", model="tiny")
    environment = {**CPU_ENVIRONMENT, **QUIET_ENVIRONMENT, "OMP_NUM_THREADS": "1"}
    watched = Watched(command, log, environment={k: os.environ.get(k, v) for k, v in environment.items()})
    try:
        served = wait_for(spec, watched, log)
        assert served == Served("tiny", str(tmp_path / "teacher"), 64)
        generator = torch.Generator().manual_seed(0)
        vocabulary = model.config.vocab_size
        sequences = [torch.randint(vocabulary, (n,), generator=generator) for n in (1, 2, 17, 40, 63)]
        fields = UrlTeacher(spec).score(sequences)
        for ids, scores, scored in zip(
            sequences, fields["teacher_logprobs"].unbind(), fields["teacher_ids"].unbind(), strict=True
        ):
            with torch.no_grad():
                plain = model(ids[None]).logits[0].log_softmax(-1)
            wanted = plain[:-1].gather(1, ids[1:, None])
            torch.testing.assert_close(scores[:-1], wanted, atol=1e-4, rtol=0)
            assert scored.flatten().tolist() == [*ids.tolist()[1:], 0] and scores[-1] == 0
        with pytest.raises(
            RuntimeError, match=r"HTTP 400: .*64.*needs a --max-model-len of at least 65, where it has 64"
        ):
            UrlTeacher(spec).score([torch.zeros(64, dtype=torch.int64)])
        with pytest.raises(RuntimeError, match=r"HTTP 400: .*vocab"):
            UrlTeacher(spec).score([torch.tensor([1, vocabulary + 5])])
    finally:
        watched.close()
    with pytest.raises(ConfigError, match="no server answers"):
        probe(spec)


def wait_for(spec: TeacherSpec, watched: Any, log: Path) -> Served:
    """Return the probe's answer as soon as there is one; fail with the server's log when it ends or takes too long."""
    from distilled_rl.processes import tail

    deadline = time.monotonic() + 120
    while True:
        try:
            return probe(spec)
        except ConfigError as error:
            if watched.process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"vllm serve did not come up ({error}):\n{tail(log, 40)}")
        time.sleep(0.3)
