"""A model behind the HTTP API: requests become jobs, jobs become answers as OpenAI's clients expect them."""

import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from twoscale.data import Pieces, Tokenizer
from twoscale.model import LoopedGPT
from twoscale.serve.api import MOST_PROMPTS, CompletionRequest, Refused, jobs_of
from twoscale.serve.connections import Connections
from twoscale.serve.job import Job
from twoscale.serve.limits import Limits
from twoscale.serve.scheduler import Scheduler
from twoscale.serve.worker import Worker


@dataclass
class Choice:
    """One answer as it is written: text that is safe to show, cut where a stop word begins."""

    job: Job
    pieces: Pieces
    stops: list[str]
    text: str = ""
    """All that may be shown so far."""
    held: str = ""
    """What might be the beginning of a stop word."""
    finish: str | None = None
    timed_out: bool = False
    """Whether the time limit ended it."""
    offsets: list[int] = field(default_factory=list)
    """Where the text of each of its tokens begins; what comes after a stop word is not its own."""

    def take(self, first: int, last: int, done: bool) -> str:
        """New text from tokens first .. last - 1."""
        before = len(self.text)
        for token in self.job.tokens[first:last]:
            if self.finish is not None:
                break
            self.offsets.append(len(self.text) + len(self.held))
            if token not in self.job.stop:
                self._add(self.pieces.add(token))
        if done and self.finish is None:
            self._add(self.pieces.rest())
        if done and self.finish is None:
            self.text, self.held = self.text + self.held, ""
            self.finish = self.job.finish if self.job.finish in ("stop", "length") else "stop"
        return self.text[before:]

    def cut(self) -> str:
        """The time is up: what has been written so far is the answer. Returns its last piece."""
        before, self.timed_out = len(self.text), True
        self.take(len(self.offsets), len(self.job.tokens), False)
        if self.finish is None:
            self._add(self.pieces.rest())
        if self.finish is None:
            self.text, self.held, self.finish = self.text + self.held, "", "length"
        return self.text[before:]

    @property
    def steps(self) -> list[tuple[int, ...]]:
        """Those of its own tokens."""
        return self.job.steps[: len(self.offsets)]

    def _add(self, piece: str) -> None:
        text = self.held + piece
        found = [at for stop in self.stops if (at := text.find(stop)) >= 0]
        if found:
            self.text, self.held, self.finish = self.text + text[: min(found)], "", "stop"
            self.job.cancelled = True
            return
        keep = max((n for stop in self.stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)
        self.text, self.held = self.text + text[: len(text) - keep], text[len(text) - keep :]


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
        self.most_loops = max(self.limits.loops, own)
        self.longest = model.config.block_size * max(1, int(tokenizer.byte_lengths().max()))
        """Bytes that a prompt can have and still fit the context."""
        self.worker = Worker(scheduler, self.limits.queue)
        self.connections = Connections(self.limits)
        self.started = int(time.time())
        self.refused = 0

    # -- requests ------------------------------------------------------------------------------------------------

    def prompts(self, given: CompletionRequest) -> list[list[int]]:
        """The prompts as tokens."""
        found = given.prompt
        for text in [found] if isinstance(found, str) else found:
            if isinstance(text, str) and len(text) > self.longest:
                raise Refused(f"the prompt has {len(text)} characters, more than fit the context", "prompt")
            if isinstance(text, str) and not _whole_characters(text):
                raise Refused("the prompt holds half a character (a lone surrogate)", "prompt")
        if isinstance(found, str):
            return [self.tokenizer.encode(found)]
        if all(isinstance(x, int) for x in found):
            return [list(found)]  # type: ignore[arg-type]
        if len(found) > MOST_PROMPTS:
            raise Refused(f"at most {MOST_PROMPTS} prompts in a request", "prompt")
        return [self.tokenizer.encode(x) if isinstance(x, str) else list(x) for x in found]  # type: ignore[arg-type]

    def open(self, given: CompletionRequest) -> list[Choice]:
        if given.model not in ("", self.name):
            raise Refused(f"there is no model {given.model!r} here, only {self.name!r}", "model", 404)
        jobs = jobs_of(given, self.prompts(given), self.model, self.tokenizer.eot, self.calibrated, self.most_loops)
        if len(jobs) > self.limits.queue:
            raise Refused(f"at most {self.limits.queue} texts can wait here", "n")
        for job in jobs:
            self.worker.scheduler.check(job)
        return [Choice(job, Pieces(self.tokenizer, job.prompt), given.stops()) for job in jobs]

    async def news(self, choices: list[Choice]) -> AsyncIterator[tuple[int, str, int]]:
        """(number, new text, first new token) as they come.

        When the time is up the answers end with what they have; TimeoutError where there is not one token.
        """
        jobs = [c.job for c in choices]
        try:
            async for i, news in self.worker.listen(jobs, self.limits.seconds):
                choice = choices[i]
                if choice.finish is None:
                    yield i, choice.take(news.first, news.last, news.done), news.first
        except TimeoutError:
            if not any(choice.offsets for choice in choices):
                raise
            for i, choice in enumerate(choices):
                if choice.finish is None:
                    first = len(choice.offsets)
                    yield i, choice.cut(), first

    # -- answers -------------------------------------------------------------------------------------------------

    def choice(self, i: int, choice: Choice, text: str, first: int = 0) -> dict[str, Any]:
        """A choice with its tokens from `first` on."""
        job, last = choice.job, len(choice.offsets)
        told = None
        if job.logprobs is not None:
            likely = job.likely[first:last]
            told = {
                "tokens": [self._spelt(t) for t in job.tokens[first:last]],
                "token_logprobs": [entry[0][1] for entry in likely],
                "top_logprobs": [{self._spelt(t): p for t, p in entry} for entry in likely],
                "text_offset": choice.offsets[first:last],
            }
        steps = [list(s) for s in choice.steps[first:]]
        found = {"index": i, "text": text, "logprobs": told, "finish_reason": choice.finish, "steps": steps}
        return {**found, "timed_out": True} if choice.timed_out else found

    def _spelt(self, token: int) -> str:
        """A token as text; its number where it is a part of a character, so that no two look alike."""
        text = self.tokenizer.decode([token])
        return f"token_id:{token}" if "\N{REPLACEMENT CHARACTER}" in text else text

    def usage(self, choices: list[Choice], n: int) -> dict[str, int]:
        read = sum(len(c.job.prompt) for c in choices[::n])
        written = sum(len(c.offsets) for c in choices)
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}

    def saved(self, choices: list[Choice]) -> dict[str, Any]:
        """What leaving early has spared."""
        steps = [s for c in choices for s in c.steps]
        sizes = [len(g) for g in self.model.config.groups]
        loops = choices[0].job.settings.loops
        most = len(steps) * sum(k * n for k, n in zip(loops, sizes, strict=True))
        taken = sum(k * n for s in steps for k, n in zip(s, sizes, strict=True))
        means = [sum(s[g] for s in steps) / max(1, len(steps)) for g in range(len(sizes))]
        saved = 1 - taken / most if most else 0.0
        return {"loops": list(loops), "mean_steps": means, "work_saved": saved, "seed": choices[0].job.sampling.seed}

    def head(self) -> dict[str, Any]:
        return {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time()), "model": self.name}

    def entry(self) -> dict[str, Any]:
        return {"id": self.name, "object": "model", "created": self.started, "owned_by": "twoscale"}

    def metrics(self) -> str:
        """Prometheus's text format."""
        s, c = self.worker.scheduler, self.worker.scheduler.counters
        lines = []

        def tell(name: str, kind: str, words: str, *values: tuple[str, float]) -> None:
            lines.extend([f"# HELP twoscale_{name} {words}", f"# TYPE twoscale_{name} {kind}"])
            lines.extend(f"twoscale_{name}{labels} {value!r}" for labels, value in values)

        tell("waiting", "gauge", "Requests in the queue.", ("", len(s.waiting)))
        tell("running", "gauge", "Requests that are being served.", ("", len(s.running)))
        tell("refused_total", "counter", "Requests that were told to come back later.", ("", self.refused))
        tell("connections", "gauge", "Open connections.", ("", len(self.connections.open)))
        tell(
            "connections_cut_total",
            "counter",
            "Connections closed by a time limit or to make room.",
            ("", self.connections.cut),
        )
        tell("finished_total", "counter", "Texts that have ended.", ("", c.finished))
        tell("tokens_total", "counter", "New tokens.", ("", c.tokens))
        tell("passed_total", "counter", "Tokens that went through the network, those of prompts included.", ("", c.passed))
        tell("engine_seconds_total", "counter", "Seconds in the engine.", ("", c.engine_seconds))
        tell("calls_total", "counter", "Calls that rows shared.", ("", c.calls))
        tell("rows_total", "counter", "Rows in all calls.", ("", c.rows))
        tell("batch_fill", "gauge", "Texts of a round, as a share of those that it may have.", ("", min(1.0, len(s.running) / s.rows)))
        tell("cache_bytes", "gauge", "Bytes of keys and values that are promised.", ("", s.held))
        tell("cache_bytes_limit", "gauge", "Bytes that may be promised.", ("", s.cache_bytes))
        steps = [(f'{{group="{g}"}}', n) for g, n in enumerate(c.steps)]
        tell("loop_steps_total", "counter", "Applications of each group's map to one token.", *steps)
        means = [(labels, n / max(1, c.passed)) for labels, n in steps]
        tell("mean_steps", "gauge", "Mean steps of a token in each group.", *means)
        return "\n".join(lines) + "\n"


def _whole_characters(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
