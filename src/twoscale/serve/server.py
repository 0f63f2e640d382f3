"""Serves one model: converts completion requests to engine requests, and their tokens to OpenAI's response format."""

import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from typing import Any

from twoscale.config.dtypes import KVDtype
from twoscale.data import Tokenizer
from twoscale.engine.request import Request
from twoscale.engine.scheduler import Scheduler
from twoscale.engine.speculation import NO_SPECULATION_STATS, OFF, Speculation
from twoscale.engine.text import TextStream
from twoscale.model import LoopedGPT
from twoscale.serve.api import MAX_PROMPTS, CompletionRequest, InvalidRequest, engine_requests
from twoscale.serve.connections import Connections
from twoscale.serve.limits import Limits
from twoscale.serve.scheduler_thread import SchedulerThread


@dataclass
class Choice:
    """One completion while it is generated: a `choice` of OpenAI's response."""

    request: Request
    text_stream: TextStream
    finish_reason: str | None = None
    """None while it is generated."""
    timed_out: bool = False
    """Whether the time limit cut it off."""

    @property
    def text(self) -> str:
        return self.text_stream.text

    @property
    def offsets(self) -> list[int]:
        """Where in the text each token begins."""
        return self.text_stream.offsets

    @property
    def n_tokens(self) -> int:
        """Tokens of the answer, without those after a stop string."""
        return len(self.text_stream.offsets)

    def add_tokens(self, first: int, last: int, done: bool) -> str:
        """Add tokens first .. last - 1 of the request; returns the new text."""
        before = len(self.text)
        for token in self.request.tokens[first:last]:
            self.text_stream.add(token)
        if done:
            self.text_stream.finish()
        if self.text_stream.stopped:
            self.finish_reason, self.request.cancelled = "stop", True
        elif done:
            self.finish_reason = self.request.finish_reason if self.request.finish_reason in ("stop", "length") else "stop"
        return self.text[before:]

    def time_out(self) -> str:
        """End it with the tokens generated so far; returns the rest of its text."""
        before, self.timed_out = len(self.text), True
        self.add_tokens(self.n_tokens, len(self.request.tokens), False)
        self.text_stream.finish()
        self.finish_reason = self.finish_reason or "length"
        return self.text[before:]

    @property
    def steps(self) -> list[tuple[int, ...]]:
        """Loop steps of its tokens; tokens after a stop string are left out."""
        return self.request.steps[: self.n_tokens]


class Server:
    """The model, tokenizer, worker thread and limits behind the HTTP API."""

    def __init__(
        self,
        model: LoopedGPT,
        tokenizer: Tokenizer,
        name: str,
        scheduler: Scheduler,
        *,
        calibration: tuple[Any, int] | None = None,
        limits: Limits | None = None,
        key: str | None = None,
        speculate: Speculation = OFF,
        kv_dtype: KVDtype = "auto",
    ) -> None:
        """`calibration`: the calibrated rules of the groups and their loops, for `exit=auto`. `speculate`: the default of requests.
        `kv_dtype`: the dtype of keys and values of all requests."""
        self.speculate, self.kv_dtype = speculate, kv_dtype
        self.model, self.tokenizer, self.name, self.key = model, tokenizer, name, key
        self.calibration, self.limits = calibration, limits or Limits()
        default_loops = max((*model.config.loops_for(None), calibration[1] if calibration else 0), default=0)
        self.max_loops = max(self.limits.max_loops, default_loops)
        self.max_prompt_chars = model.config.block_size * max(1, int(tokenizer.byte_lengths().max()))
        """Prompts of more characters cannot fit the context, and are refused without tokenizing them: a character has at least one byte."""
        self.scheduler_thread = SchedulerThread(scheduler, self.limits.max_queue)
        self.connections = Connections(self.limits)
        self.started = int(time.time())
        self.n_rejected = 0
        """HTTP requests rejected because the queue was full, the server was shutting down or the scheduler's thread had ended."""

    # -- requests ------------------------------------------------------------------------------------------------

    def prompts(self, body: CompletionRequest) -> list[list[int]]:
        """The prompts of a request as token ids."""
        prompt = body.prompt
        for text in [prompt] if isinstance(prompt, str) else prompt:
            if isinstance(text, str) and len(text) > self.max_prompt_chars:
                raise InvalidRequest(f"the prompt has {len(text)} characters, more than fit the context", "prompt")
            if isinstance(text, str) and not _is_valid_utf8(text):
                raise InvalidRequest("the prompt contains a lone surrogate (half a character)", "prompt")
        if isinstance(prompt, str):
            return [self.tokenizer.encode(prompt)]
        if all(isinstance(x, int) for x in prompt):
            return [list(prompt)]  # type: ignore[arg-type]
        if len(prompt) > MAX_PROMPTS:
            raise InvalidRequest(f"at most {MAX_PROMPTS} prompts in a request", "prompt")
        return [self.tokenizer.encode(x) if isinstance(x, str) else list(x) for x in prompt]  # type: ignore[arg-type]

    def make_choices(self, body: CompletionRequest) -> list[Choice]:
        """The choices of a completion request, not yet submitted; InvalidRequest or UserError if it can never be served."""
        if body.model not in ("", self.name):
            raise InvalidRequest(f"there is no model {body.model!r} here, only {self.name!r}", "model", 404)
        requests = engine_requests(
            body, self.prompts(body), self.model, self.tokenizer.eot, self.calibration, self.max_loops, self.speculate, self.kv_dtype
        )
        if len(requests) > self.limits.max_queue:
            raise InvalidRequest(f"at most {self.limits.max_queue} completions fit the queue of this server", "n")
        for request in requests:
            self.scheduler_thread.scheduler.check(request)
        return [Choice(r, TextStream(self.tokenizer, r.prompt, r.sampling.stop, r.sampling.stop_token_ids)) for r in requests]

    async def stream_choices(self, choices: list[Choice]) -> AsyncIterator[tuple[int, str, int]]:
        """Submit the requests and yield (index of the choice, new text, index of its first new token) as tokens are generated.

        At the time limit the choices end with the tokens they have; TimeoutError if there are none.
        """
        try:
            async for i, update in self.scheduler_thread.submit_and_stream([c.request for c in choices], self.limits.timeout):
                choice = choices[i]
                if choice.finish_reason is None:
                    yield i, choice.add_tokens(update.first, update.last, update.done), update.first
        except TimeoutError:
            if not any(choice.n_tokens for choice in choices):
                raise
            for i, choice in enumerate(choices):
                if choice.finish_reason is None:
                    first = choice.n_tokens
                    yield i, choice.time_out(), first

    # -- responses -----------------------------------------------------------------------------------------------

    def choice_json(self, i: int, choice: Choice, text: str, first: int = 0) -> dict[str, Any]:
        """A choice of the response, with the tokens from `first` on."""
        request, last = choice.request, choice.n_tokens
        logprobs = None
        if request.sampling.logprobs is not None:
            likely = request.logprobs[first:last]
            logprobs = {
                "tokens": [self._token_text(t) for t in request.tokens[first:last]],
                "token_logprobs": [entry[0][1] for entry in likely],
                "top_logprobs": [{self._token_text(t): p for t, p in entry} for entry in likely],
                "text_offset": choice.offsets[first:last],
            }
        steps = [list(s) for s in choice.steps[first:]]
        fields = {"index": i, "text": text, "logprobs": logprobs, "finish_reason": choice.finish_reason, "steps": steps}
        return {**fields, "timed_out": True} if choice.timed_out else fields

    def _token_text(self, token: int) -> str:
        """A token as text; if it is part of a character, its id, so that different tokens have different keys."""
        text = self.tokenizer.decode([token])
        return f"token_id:{token}" if "\N{REPLACEMENT CHARACTER}" in text else text

    def summary(self, choices: list[Choice], n: int) -> dict[str, Any]:
        """`usage` and `twoscale` of a response to prompts with n choices each."""
        return {"usage": self.usage(choices, n), "twoscale": self.loop_summary(choices)}

    def usage(self, choices: list[Choice], n: int) -> dict[str, Any]:
        """OpenAI's token counts; its fields for predictions count the guesses of speculation. A prompt with n completions counts once."""
        n_prompt = sum(len(c.request.prompt) for c in choices[::n])
        n_completion = sum(c.n_tokens for c in choices)
        stats = sum((c.request.speculation_stats for c in choices), NO_SPECULATION_STATS)
        return {
            "prompt_tokens": n_prompt,
            "completion_tokens": n_completion,
            "total_tokens": n_prompt + n_completion,
            "completion_tokens_details": {
                "accepted_prediction_tokens": stats.accepted,
                "rejected_prediction_tokens": stats.drafted - stats.accepted,
            },
        }

    def loop_summary(self, choices: list[Choice]) -> dict[str, Any]:
        """Mean loop steps, and the fraction of loop steps (weighted by layers) that early exits saved."""
        steps = [s for c in choices for s in c.steps]
        sizes = [len(g) for g in self.model.config.groups]
        loops = choices[0].request.loop_params.loops
        full = len(steps) * sum(k * n for k, n in zip(loops, sizes, strict=True))
        taken = sum(k * n for s in steps for k, n in zip(s, sizes, strict=True))
        means = [sum(s[g] for s in steps) / max(1, len(steps)) for g in range(len(sizes))]
        saved = 1 - taken / full if full else 0.0
        speculation = asdict(sum((c.request.speculation_stats for c in choices), NO_SPECULATION_STATS))
        seed = choices[0].request.sampling.seed
        return {"loops": list(loops), "mean_steps": means, "work_saved": saved, "seed": seed, "speculation": speculation}

    def response_fields(self) -> dict[str, Any]:
        """The fields that all chunks of a response share."""
        return {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time()), "model": self.name}

    def model_entry(self) -> dict[str, Any]:
        """The entry of /v1/models."""
        return {"id": self.name, "object": "model", "created": self.started, "owned_by": "twoscale"}

    def metrics(self) -> str:
        """Metrics in Prometheus's text format. A sequence is one prompt with one completion; an HTTP request may have several."""
        s, c = self.scheduler_thread.scheduler, self.scheduler_thread.scheduler.counters
        lines = []

        def add(name: str, kind: str, help_text: str, *values: tuple[str, float]) -> None:
            lines.extend([f"# HELP twoscale_{name} {help_text}", f"# TYPE twoscale_{name} {kind}"])
            lines.extend(f"twoscale_{name}{labels} {value!r}" for labels, value in values)

        add("waiting", "gauge", "Sequences in the queue.", ("", len(s.waiting)))
        add("running", "gauge", "Sequences being generated.", ("", len(s.running)))
        add("rejected_total", "counter", "HTTP requests rejected with 429 or 503.", ("", self.n_rejected))
        add("connections", "gauge", "Open connections.", ("", len(self.connections.open_connections)))
        add(
            "connections_closed_total",
            "counter",
            "Connections closed by a time limit or because too many were open.",
            ("", self.connections.n_closed),
        )
        add("finished_total", "counter", "Sequences that were started and have ended.", ("", c.finished))
        add("tokens_total", "counter", "Generated tokens.", ("", c.tokens))
        add("processed_tokens_total", "counter", "Tokens whose forward pass is done, prompts included.", ("", c.processed_tokens))
        add("engine_seconds_total", "counter", "Seconds spent in the engine.", ("", c.engine_seconds))
        add(
            "calls_total",
            "counter",
            "Stage passes: loop steps, and passes through plain layers, of any number of rows.",
            ("", c.stage_passes),
        )
        add("rows_total", "counter", "Rows (tokens) of all stage passes together.", ("", c.rows))
        add(
            "running_ratio",
            "gauge",
            "Running sequences divided by max_num_seqs, at most 1.",
            ("", min(1.0, len(s.running) / s.max_num_seqs)),
        )
        add("cache_bytes", "gauge", "KV cache bytes reserved by running sequences.", ("", s.reserved_bytes))
        add("cache_bytes_limit", "gauge", "KV cache bytes that may be reserved.", ("", s.cache_bytes))
        steps = [(f'{{group="{g}"}}', n) for g, n in enumerate(c.loop_steps)]
        add("loop_steps_total", "counter", "Loop steps of all rows, by group; drafts and rejected guesses included.", *steps)
        means = [(labels, n / max(1, c.processed_tokens)) for labels, n in steps]
        add("mean_steps", "gauge", "Loop steps per processed token, by group; drafts and rejected guesses included.", *means)
        stats = c.speculation_stats
        add(
            "speculation_drafted_total",
            "counter",
            "Guesses submitted for verification, those dropped before its end included.",
            ("", stats.drafted),
        )
        add("speculation_accepted_total", "counter", "Guesses that were right.", ("", stats.accepted))
        add("speculation_rewound_total", "counter", "Positions computed on a wrong guess and removed.", ("", stats.rewound))
        add("speculation_acceptance", "gauge", "Share of the guesses that were right.", ("", stats.acceptance))
        return "\n".join(lines) + "\n"


def _is_valid_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
