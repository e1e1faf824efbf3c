"""A teacher behind a URL: a running ``vllm serve``, which several runs may share, asked for the log-probs of whole sequences.

Of the OpenAI-style API it uses ``GET /v1/models`` and ``POST /v1/completions`` with vLLM's own ``prompt_logprobs: 0``, whose
answer holds, for every token of the prompt but the first, ``{"<id>": {"logprob": float}}``. The API cannot score without
generating, so the server also writes one token, and a sequence may have at most ``max_model_len - 1`` tokens.

A log-prob of -inf is no JSON: vLLM writes -9999.0 in its place (``clamp_prompt_logprobs``,
vllm/entrypoints/generate/base/serving.py:305), which is refused here as -inf is.
"""

import asyncio
import itertools
import json
import os
import random
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import httpx
import msgspec
import numpy as np
import torch
from tensordict import TensorDict

from distilled_rl.config import ConfigError
from distilled_rl.jagged import from_rows, same_layout
from distilled_rl.teacher.specs import TeacherSpec

# Requests on the way at once, and the tokens of one. A longer sequence is a request of its own.
CONCURRENCY, REQUEST_TOKENS = 16, 8192
# Seconds after which a request that keeps failing is given up, pauses included; a longer teacher.timeout takes its place.
GIVE_UP_AFTER = 60.0
CONNECT_TIMEOUT = 10.0
# Seconds before the second attempt, doubled before each further one, up to the longest; Retry-After may ask for more.
FIRST_PAUSE, LONGEST_PAUSE, LONGEST_RETRY_AFTER = 1.0, 16.0, 30.0
# Statuses that are tried again, beside all from 500 on.
RETRIED = (408, 429)
CLAMPED = -9999.0
# A log-prob above this is none. (Rounding may leave a little more than 0.)
LARGEST_LOG_PROB = 1e-3

# Not seeded, and not Python's shared generator: runs of one seed must not all come back to the server at the same moments.
_jitter = random.SystemRandom()


class Served(NamedTuple):
    """A model that a server offers: the ``id`` to ask for, the path or hub name it was loaded from, and the most tokens that
    a sequence and its next token may have; None where the server does not tell."""

    id: str
    root: str | None
    max_model_len: int | None


class _Models(msgspec.Struct):
    data: list[dict[str, Any]]


class _LogProb(msgspec.Struct):
    logprob: float | None


class _Choice(msgspec.Struct):
    index: int
    prompt_logprobs: list[dict[str, _LogProb] | None] | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]


class UrlTeacher:
    """A :class:`distilled_rl.teacher.scoring.Source` that asks the server at ``spec.url``.

    Connection errors, timeouts and the statuses 408, 429 and 5xx are tried again, ``spec.retries`` times at most. One attempt
    may take ``spec.timeout`` seconds, all attempts and pauses of a request together the longer of that and ``GIVE_UP_AFTER``.
    The API key is the environment variable OPENAI_API_KEY, if it is set.

    Raises :class:`ConfigError` for a URL that is none.
    """

    def __init__(self, spec: TeacherSpec) -> None:
        self.spec = spec
        self.url = base_url(spec)
        self._served: Served | None = None

    def score(self, sequences: Sequence[torch.Tensor]) -> TensorDict:
        """See :class:`distilled_rl.teacher.scoring.Source`. The result is on the CPU.

        Raises ``RuntimeError`` for a server that fails or refuses, and ``ValueError`` for an answer that does not hold one
        finite log-prob of each very token that was sent. Both name the teacher, its URL, and what to do.
        """
        ids = [sequence.tolist() for sequence in sequences]
        if [] in ids:
            raise ValueError(f"{self._name()} was given an empty sequence (number {ids.index([])})")
        scores: Any = from_rows([row[:, None] for row in asyncio.run(self._score(ids))])
        tokens = from_rows(
            [torch.cat([row[1:], row.new_zeros(1)])[:, None] for row in (s.cpu().int() for s in sequences)]
        )
        fields = {"teacher_logprobs": scores, "teacher_ids": same_layout(tokens, scores)}
        return TensorDict(fields, batch_size=len(ids))

    async def _score(self, sequences: list[list[int]]) -> list[torch.Tensor]:
        """Return the log-probs of each sequence, float32 [j], shifted left by one, the last a dummy 0."""
        rows: list[torch.Tensor] = [torch.empty(0)] * len(sequences)
        gate = asyncio.Semaphore(CONCURRENCY)

        async def ask(served: Served, chunk: range) -> None:
            async with gate:
                prompts = sequences[chunk.start : chunk.stop]
                answer = await self._send(client, "POST", "/v1/completions", self._request(served, prompts), prompts)
            for number, given in zip(chunk, self._choices(answer, len(chunk)), strict=True):
                rows[number] = self._log_probs(number, sequences[number], given)

        limits = httpx.Limits(max_connections=CONCURRENCY, max_keepalive_connections=CONCURRENCY)
        timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT)  # `_send` bounds the whole of an attempt
        async with httpx.AsyncClient(base_url=self.url, headers=_headers(), limits=limits, timeout=timeout) as client:
            if self._served is None:
                self._served = served_model(self.spec, await self._send(client, "GET", "/v1/models"))
            try:
                async with asyncio.TaskGroup() as group:  # the first that fails takes back all others
                    for chunk in chunks([len(sequence) for sequence in sequences], REQUEST_TOKENS):
                        group.create_task(ask(self._served, chunk))
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from None
        return rows

    def _request(self, served: Served, prompts: list[list[int]]) -> bytes:
        body = {"model": served.id, "prompt": prompts, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        return msgspec.json.encode(body)

    async def _send(
        self,
        client: httpx.AsyncClient,
        method: str,
        path: str,
        body: bytes | None = None,
        prompts: Sequence[Sequence[int]] = (),
    ) -> bytes:
        """Return the body of a successful answer. Raises ``RuntimeError`` when the server gives none in time."""
        started = time.monotonic()
        deadline = started + max(GIVE_UP_AFTER, self.spec.timeout)
        trouble = ""
        for attempt in itertools.count(1):
            pause = min(FIRST_PAUSE * 2 ** (attempt - 1), LONGEST_PAUSE) * _jitter.uniform(0.5, 1.0)
            limit = min(self.spec.timeout, deadline - time.monotonic())
            try:
                async with asyncio.timeout(limit):
                    response = await client.request(
                        method, path, content=body, headers={"Content-Type": "application/json"}
                    )
            except TimeoutError:
                if not trouble or limit == self.spec.timeout:  # not one that the deadline cut short
                    trouble = f"no answer within {limit:.3g} s (raise {self.spec.where}.timeout if the server is busy)"
            except httpx.RequestError as error:
                trouble = f"{type(error).__name__} {error}".strip()
            else:
                if response.status_code == 200:
                    return response.content
                trouble = f"HTTP {response.status_code}: {_message(response)}"
                if response.status_code < 500 and response.status_code not in RETRIED:
                    self._refused(trouble, prompts)
                pause = max(pause, min(_retry_after(response), LONGEST_RETRY_AFTER))
            if attempt > self.spec.retries or time.monotonic() + pause >= deadline:
                raise RuntimeError(
                    f"{self._name()} failed: {trouble}; gave up after {attempt} attempt(s) in "
                    f"{time.monotonic() - started:.1f} s. See that its vLLM server runs, and look into its log; then "
                    "start the run again, which goes on from its last checkpoint"
                )
            await asyncio.sleep(pause)
        raise AssertionError("unreachable")

    def _refused(self, trouble: str, prompts: Sequence[Sequence[int]]) -> NoReturn:
        """Raise for an answer that would be the same at the next attempt."""
        if "not JSON compliant" in trouble:  # what vLLM makes of a NaN: starlette's JSONResponse refuses to write it
            raise ValueError(
                f"{self._name()} computed a log-prob that is no number ({trouble}): check its weights and its dtype"
            )
        longest = max(map(len, prompts), default=0)
        room = self._served and self._served.max_model_len
        advice = "check the URL and the server's version"
        if trouble.startswith(("HTTP 401", "HTTP 403")):
            advice = "set the environment variable OPENAI_API_KEY to the server's --api-key"
        elif trouble.startswith("HTTP 404"):
            advice = "check that the URL is that of an OpenAI-style server and that it still serves this model"
        elif prompts:
            advice = (
                f"the longest of the {len(prompts)} sequence(s) sent has {longest} tokens, and the server needs a "
                f"--max-model-len of at least {longest + 1}, where it has {room or 'an unknown one'}; its vocabulary "
                "must hold every id that the student samples"
            )
        raise RuntimeError(f"{self._name()} refuses the request ({trouble}): {advice}")

    def _choices(self, answer: bytes, count: int) -> list[_Choice]:
        """Return one choice per prompt, in order."""
        try:
            completion = _decoded(answer, _Completion)
        except ValueError as error:
            self._wrong(f"something else than a completion of vLLM's API ({error})", "check the URL")
        choices = sorted(completion.choices, key=lambda choice: choice.index)
        if [choice.index for choice in choices] != list(range(count)):
            self._wrong(
                f"choices numbered {[choice.index for choice in choices][:8]} to {count} prompt(s)",
                "nothing between the run and vLLM may split or merge requests",
            )
        return choices

    def _log_probs(self, number: int, ids: list[int], choice: _Choice) -> torch.Tensor:
        """Return the checked log-probs of one sequence, float32 [j], shifted left by one, the last a dummy 0."""
        given = choice.prompt_logprobs
        if given is None:
            self._wrong("a completion without prompt_logprobs", "only vLLM's own server gives them")
        if len(given) != len(ids):
            self._wrong(
                f"{len(given)} positions for sequence {number} of {len(ids)} tokens",
                "it must not add, drop or truncate tokens",
            )
        if given[0] is not None:
            self._wrong(f"a log-prob of the first token of sequence {number}", "positions must not be shifted")
        try:
            values = [entry[str(token)].logprob for entry, token in zip(given[1:], ids[1:], strict=True)]  # type: ignore[index]
        except (KeyError, TypeError):
            pairs = enumerate(zip(given, ids, strict=True))
            position, entry = next((p, entry) for p, (entry, token) in pairs if p and str(token) not in (entry or {}))
            if entry is None:
                what = f"null for position {position} of sequence {number}"
                self._wrong(what, "it must score the whole prompt: see that nothing caches or rewrites its answers")
            self._wrong(
                f"the token ids {', '.join(list(entry)[:4]) or '(none)'} for position {position} of sequence {number}, "
                f"where {ids[position]} was sent",
                "it reads with another tokenizer or in another order",
            )
        scores = np.array([*values, 0.0], dtype=np.float64)  # None becomes NaN
        wrong = ~((scores > CLAMPED) & (scores <= LARGEST_LOG_PROB))
        if wrong.any():
            position = int(wrong.argmax()) + 1
            shown = {CLAMPED: "-9999, which stands for -inf,", None: "null"}.get(values[position - 1])
            self._wrong(
                f"the log-prob {shown or values[position - 1]} for position {position} of sequence {number} (token "
                f"{ids[position]}; {int(wrong.sum())} such value(s) in it)",
                "a finite number of at most 0 is needed: check its weights, its dtype and that its vocabulary holds the token",
            )
        return torch.from_numpy(scores).float()

    def _name(self) -> str:
        return f"the teacher {self.spec.name} at {self.url}"

    def _wrong(self, what: str, advice: str) -> NoReturn:
        raise ValueError(f"{self._name()} answered with {what}: {advice}")


def probe(spec: TeacherSpec, timeout: float = 5.0) -> Served:
    """Return the model that the server at ``spec.url`` would be asked for, asking it once, for at most about ``timeout`` seconds.

    Raises :class:`ConfigError` when nothing listens there, when it is no OpenAI-style server, or when it does not serve the model.
    """
    url = base_url(spec)
    try:
        response = httpx.get(f"{url}/v1/models", headers=_headers(), timeout=timeout)
    except httpx.RequestError as error:
        raise ConfigError(
            f"no server answers for the teacher {spec.name} at {url} ({type(error).__name__} {error}): start it (vllm "
            f"serve {spec.model or 'MODEL'}) and wait until it is ready, or correct {spec.where}.url"
        ) from error
    if response.status_code in (401, 403):
        raise ConfigError(
            f"the server of the teacher {spec.name} at {url} wants a key (HTTP {response.status_code}): set the "
            "environment variable OPENAI_API_KEY to its --api-key"
        )
    if response.status_code != 200:
        raise ConfigError(
            f"the server of the teacher {spec.name} at {url} answers /v1/models with HTTP {response.status_code} "
            f"({_message(response)}): it is no OpenAI-style server, or not ready; correct {spec.where}.url or wait for it"
        )
    return served_model(spec, response.content)


def base_url(spec: TeacherSpec) -> str:
    """Return ``spec.url`` without a trailing slash or ``/v1``. Raises :class:`ConfigError` when it is no http(s) URL."""
    text = str(spec.url or "").strip()
    try:
        valid = httpx.URL(text).scheme in ("http", "https") and bool(httpx.URL(text).host)
    except httpx.InvalidURL:
        valid = False
    if not valid:
        raise ConfigError(
            f"{spec.where}.url of the teacher {spec.name} is {spec.url!r}: give that of a vLLM server, such as "
            "http://localhost:8000"
        )
    return text.rstrip("/").removesuffix("/v1").rstrip("/")


def served_model(spec: TeacherSpec, answer: bytes) -> Served:
    """Return the model to ask for, from the answer to ``GET /v1/models``: the only one, or that whose ``id``, else ``root``,
    is ``spec.model``. Raises :class:`ConfigError` when there is none."""
    try:
        cards = [
            Served(str(card["id"]), card.get("root"), card.get("max_model_len"))
            for card in _decoded(answer, _Models).data
        ]
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"the server of the teacher {spec.name} at {spec.url} is no OpenAI-style server: /v1/models answers with "
            f"something else than a list of models ({error}); correct {spec.where}.url"
        ) from error
    if len(cards) == 1:
        return cards[0]
    wanted = (spec.model or "").rstrip("/")
    for name in ("id", "root"):
        for card in cards:
            if wanted and (getattr(card, name) or "").rstrip("/") == wanted:
                return card
    offered = ", ".join(f"{card.id} (from {card.root})" if card.root else card.id for card in cards)
    raise ConfigError(
        f"the server of the teacher {spec.name} at {spec.url} serves {offered or 'no model'}, not "
        f"{spec.model or 'one model only'}: set {spec.where}.model to one of these ids, or start a server of the teacher"
    )


def chunks(lengths: Sequence[int], tokens: int) -> Iterator[range]:
    """Yield runs of neighbouring rows of at most ``tokens`` tokens in all, or of a single longer row."""
    start = held = 0
    for row, length in enumerate(lengths):
        if row > start and held + length > tokens:
            yield range(start, row)
            start, held = row, 0
        held += length
    if lengths:
        yield range(start, len(lengths))


def _headers() -> dict[str, str]:
    key = os.environ.get("OPENAI_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


def _decoded(content: bytes, kind: Any) -> Any:
    """Return JSON as a struct of ``kind``, NaN and Infinity included. Raises ``ValueError`` for what is none."""
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.DecodeError:
        try:
            return msgspec.convert(json.loads(content), kind)  # Python's parser knows NaN, msgspec's does not
        except json.JSONDecodeError as error:
            start = content[:60].decode(errors="replace")
            raise ValueError(f"no JSON but {start!r}") from error
        except msgspec.ValidationError as error:
            raise ValueError(str(error)) from error


def _message(response: httpx.Response) -> str:
    """Return what a server says is wrong, in one line."""
    try:
        body = response.json()
    except ValueError:
        body = None
    if isinstance(body, dict):
        inner = body.get("error")
        body = (inner.get("message") if isinstance(inner, dict) else inner) or body.get("message") or body.get("detail")
    return " ".join(str(body or response.text).split())[:400] or "without a message"


def _retry_after(response: httpx.Response) -> float:
    """Return the seconds that a server asks to wait; 0 when it does not, or names a date."""
    try:
        return max(0.0, float(response.headers.get("Retry-After", "")))
    except ValueError:
        return 0.0
