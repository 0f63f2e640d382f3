"""A model behind the HTTP API: completion requests become requests to the engine, and their tokens the answers of OpenAI's API."""

import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from twoscale.data import Tokenizer
from twoscale.engine.request import Request
from twoscale.engine.scheduler import Scheduler
from twoscale.engine.text import TextStream
from twoscale.model import LoopedGPT
from twoscale.serve.api import MAX_PROMPTS, CompletionRequest, InvalidRequest, engine_requests
from twoscale.serve.connections import Connections
from twoscale.serve.limits import Limits
from twoscale.serve.worker import Worker


@dataclass
class Choice:
    """One answer as it is written."""

    request: Request
    text_stream: TextStream
    finish: str | None = None
    timed_out: bool = False
    """Whether the time limit ended it."""

    @property
    def text(self) -> str:
        return self.text_stream.text

    @property
    def offsets(self) -> list[int]:
        return self.text_stream.offsets

    def add_tokens(self, first: int, last: int, done: bool) -> str:
        """New text from tokens first .. last - 1."""
        before = len(self.text)
        for token in self.request.tokens[first:last]:
            self.text_stream.add(token)
        if done:
            self.text_stream.finish()
        if self.text_stream.stopped:
            self.finish, self.request.cancelled = "stop", True
        elif done:
            self.finish = self.request.finish if self.request.finish in ("stop", "length") else "stop"
        return self.text[before:]

    def time_out(self) -> str:
        """The time is up: what has been written so far is the answer. Returns its last piece."""
        before, self.timed_out = len(self.text), True
        self.add_tokens(len(self.offsets), len(self.request.tokens), False)
        self.text_stream.finish()
        self.finish = self.finish or "length"
        return self.text[before:]

    @property
    def steps(self) -> list[tuple[int, ...]]:
        """Those of its own tokens."""
        return self.request.steps[: len(self.offsets)]


class Server:
    """A model behind the HTTP API."""

    def __init__(
        self,
        model: LoopedGPT,
        tokenizer: Tokenizer,
        name: str,
        scheduler: Scheduler,
        *,
        calibrated: tuple[Any, int] | None = None,
        limits: Limits | None = None,
        key: str | None = None,
    ) -> None:
        self.model, self.tokenizer, self.name, self.key = model, tokenizer, name, key
        self.calibrated, self.limits = calibrated, limits or Limits()
        own = max((*model.config.loops_for(None), calibrated[1] if calibrated else 0), default=0)
        self.max_loops = max(self.limits.max_loops, own)
        self.max_prompt_bytes = model.config.block_size * max(1, int(tokenizer.byte_lengths().max()))
        """Bytes that a prompt can have and still fit the context."""
        self.worker = Worker(scheduler, self.limits.max_queue)
        self.connections = Connections(self.limits)
        self.started = int(time.time())
        self.n_rejected = 0

    # -- requests ------------------------------------------------------------------------------------------------

    def prompts(self, body: CompletionRequest) -> list[list[int]]:
        """The prompts as tokens."""
        found = body.prompt
        for text in [found] if isinstance(found, str) else found:
            if isinstance(text, str) and len(text) > self.max_prompt_bytes:
                raise InvalidRequest(f"the prompt has {len(text)} characters, more than fit the context", "prompt")
            if isinstance(text, str) and not _whole_characters(text):
                raise InvalidRequest("the prompt holds half a character (a lone surrogate)", "prompt")
        if isinstance(found, str):
            return [self.tokenizer.encode(found)]
        if all(isinstance(x, int) for x in found):
            return [list(found)]  # type: ignore[arg-type]
        if len(found) > MAX_PROMPTS:
            raise InvalidRequest(f"at most {MAX_PROMPTS} prompts in a request", "prompt")
        return [self.tokenizer.encode(x) if isinstance(x, str) else list(x) for x in found]  # type: ignore[arg-type]

    def make_choices(self, body: CompletionRequest) -> list[Choice]:
        if body.model not in ("", self.name):
            raise InvalidRequest(f"there is no model {body.model!r} here, only {self.name!r}", "model", 404)
        requests = engine_requests(body, self.prompts(body), self.model, self.tokenizer.eot, self.calibrated, self.max_loops)
        if len(requests) > self.limits.max_queue:
            raise InvalidRequest(f"at most {self.limits.max_queue} texts can wait here", "n")
        for request in requests:
            self.worker.scheduler.check(request)
        return [Choice(r, TextStream(self.tokenizer, r.prompt, r.sampling.stop, r.sampling.stop_token_ids)) for r in requests]

    async def updates(self, choices: list[Choice]) -> AsyncIterator[tuple[int, str, int]]:
        """(number, new text, first new token) as they come.

        When the time is up the answers end with what they have; TimeoutError where there is not one token.
        """
        try:
            async for i, update in self.worker.follow([c.request for c in choices], self.limits.timeout):
                choice = choices[i]
                if choice.finish is None:
                    yield i, choice.add_tokens(update.first, update.last, update.done), update.first
        except TimeoutError:
            if not any(choice.offsets for choice in choices):
                raise
            for i, choice in enumerate(choices):
                if choice.finish is None:
                    first = len(choice.offsets)
                    yield i, choice.time_out(), first

    # -- answers -------------------------------------------------------------------------------------------------

    def choice_json(self, i: int, choice: Choice, text: str, first: int = 0) -> dict[str, Any]:
        """A choice with its tokens from `first` on."""
        request, last = choice.request, len(choice.offsets)
        logprobs = None
        if request.sampling.logprobs is not None:
            likely = request.logprobs[first:last]
            logprobs = {
                "tokens": [self._spelling(t) for t in request.tokens[first:last]],
                "token_logprobs": [entry[0][1] for entry in likely],
                "top_logprobs": [{self._spelling(t): p for t, p in entry} for entry in likely],
                "text_offset": choice.offsets[first:last],
            }
        steps = [list(s) for s in choice.steps[first:]]
        found = {"index": i, "text": text, "logprobs": logprobs, "finish_reason": choice.finish, "steps": steps}
        return {**found, "timed_out": True} if choice.timed_out else found

    def _spelling(self, token: int) -> str:
        """A token as text; its number where it is a part of a character, so that no two look alike."""
        text = self.tokenizer.decode([token])
        return f"token_id:{token}" if "\N{REPLACEMENT CHARACTER}" in text else text

    def summary(self, choices: list[Choice], n: int) -> dict[str, Any]:
        """`usage` and `twoscale` of a response to prompts with n choices each."""
        return {"usage": self.usage(choices, n), "twoscale": self.loop_summary(choices)}

    def usage(self, choices: list[Choice], n: int) -> dict[str, int]:
        read = sum(len(c.request.prompt) for c in choices[::n])
        written = sum(len(c.offsets) for c in choices)
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}

    def loop_summary(self, choices: list[Choice]) -> dict[str, Any]:
        """What leaving early has spared."""
        steps = [s for c in choices for s in c.steps]
        sizes = [len(g) for g in self.model.config.groups]
        loops = choices[0].request.params.loops
        full = len(steps) * sum(k * n for k, n in zip(loops, sizes, strict=True))
        taken = sum(k * n for s in steps for k, n in zip(s, sizes, strict=True))
        means = [sum(s[g] for s in steps) / max(1, len(steps)) for g in range(len(sizes))]
        saved = 1 - taken / full if full else 0.0
        return {"loops": list(loops), "mean_steps": means, "work_saved": saved, "seed": choices[0].request.sampling.seed}

    def response_fields(self) -> dict[str, Any]:
        return {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time()), "model": self.name}

    def model_entry(self) -> dict[str, Any]:
        return {"id": self.name, "object": "model", "created": self.started, "owned_by": "twoscale"}

    def metrics(self) -> str:
        """Prometheus's text format."""
        s, c = self.worker.scheduler, self.worker.scheduler.counters
        lines = []

        def add(name: str, kind: str, help_text: str, *values: tuple[str, float]) -> None:
            lines.extend([f"# HELP twoscale_{name} {help_text}", f"# TYPE twoscale_{name} {kind}"])
            lines.extend(f"twoscale_{name}{labels} {value!r}" for labels, value in values)

        add("waiting", "gauge", "Requests in the queue.", ("", len(s.waiting)))
        add("running", "gauge", "Requests that are being served.", ("", len(s.running)))
        add("refused_total", "counter", "Requests that were told to come back later.", ("", self.n_rejected))
        add("connections", "gauge", "Open connections.", ("", len(self.connections.active)))
        add(
            "connections_cut_total",
            "counter",
            "Connections closed by a time limit or to make room.",
            ("", self.connections.n_closed),
        )
        add("finished_total", "counter", "Texts that have ended.", ("", c.finished))
        add("tokens_total", "counter", "New tokens.", ("", c.tokens))
        add("passed_total", "counter", "Tokens that went through the network, those of prompts included.", ("", c.processed_tokens))
        add("engine_seconds_total", "counter", "Seconds in the engine.", ("", c.engine_seconds))
        add("calls_total", "counter", "Calls that rows shared.", ("", c.calls))
        add("rows_total", "counter", "Rows in all calls.", ("", c.rows))
        add(
            "batch_fill",
            "gauge",
            "Texts of a round, as a share of those that it may have.",
            ("", min(1.0, len(s.running) / s.max_num_seqs)),
        )
        add("cache_bytes", "gauge", "Bytes of keys and values that are promised.", ("", s.reserved_bytes))
        add("cache_bytes_limit", "gauge", "Bytes that may be promised.", ("", s.cache_bytes))
        steps = [(f'{{group="{g}"}}', n) for g, n in enumerate(c.loop_steps)]
        add("loop_steps_total", "counter", "Applications of each group's map to one token.", *steps)
        means = [(labels, n / max(1, c.processed_tokens)) for labels, n in steps]
        add("mean_steps", "gauge", "Mean steps of a token in each group.", *means)
        return "\n".join(lines) + "\n"


def _whole_characters(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
