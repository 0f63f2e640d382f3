"""The door: /v1/completions and /v1/models as OpenAI's clients expect them, /health and /metrics (FastAPI, the extra `serve`)."""

import asyncio
import hmac
import json
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from twoscale.config import UserError
from twoscale.data import Pieces, Tokenizer
from twoscale.model import LoopedGPT
from twoscale.serve.api import MOST_PROMPTS, CompletionRequest, Refused, jobs_of
from twoscale.serve.job import Job
from twoscale.serve.scheduler import Scheduler
from twoscale.serve.worker import Busy, Failed, Worker


@dataclass(frozen=True)
class Limits:
    """What one request may ask for."""

    body: int = 1 << 20
    """Bytes of a request."""
    seconds: float = 120.0
    """Until a request is given up."""
    loops: int = 64
    queue: int = 256
    """Requests that may wait."""


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
    offsets: list[int] = field(default_factory=list)

    def take(self, first: int, last: int, done: bool, eot: int) -> str:
        """New text from tokens first .. last - 1."""
        before = len(self.text)
        for token in self.job.tokens[first:last]:
            self.offsets.append(len(self.text) + len(self.held))
            if token != eot and self.finish is None:
                self._add(self.pieces.add(token))
        if done and self.finish is None:
            self._add(self.pieces.rest())
            self.text, self.held = self.text + self.held, ""
            self.finish = self.job.finish if self.job.finish in ("stop", "length") else "stop"
        return self.text[before:]

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
    """A model behind the door."""

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
        self.worker = Worker(scheduler, self.limits.queue)
        self.started = int(time.time())
        self.refused = 0

    # -- requests ------------------------------------------------------------------------------------------------

    def prompts(self, given: CompletionRequest) -> list[list[int]]:
        """The prompts as tokens."""
        found = given.prompt
        for text in [found] if isinstance(found, str) else found:
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
            raise Refused(f"there is no model {given.model!r} here, only {self.name!r}", "model")
        jobs = jobs_of(given, self.prompts(given), self.model, self.tokenizer.eot, self.calibrated, self.limits.loops)
        choices = []
        for job in jobs:
            pieces = Pieces(self.tokenizer)
            for token in job.prompt:
                pieces.add(token)
            choices.append(Choice(job, pieces, given.stops()))
        return choices

    async def news(self, choices: list[Choice]) -> AsyncIterator[tuple[int, str, int, int]]:
        """(number, new text, first and last token) as they come."""
        jobs = [c.job for c in choices]
        async for i, news in self.worker.listen(jobs, self.limits.seconds):
            choice = choices[i]
            if choice.finish is None:
                yield i, choice.take(news.first, news.last, news.done, self.tokenizer.eot), news.first, news.last

    # -- answers -------------------------------------------------------------------------------------------------

    def choice(self, i: int, choice: Choice, text: str, first: int, last: int, finish: str | None) -> dict[str, Any]:
        job = choice.job
        told = None
        if job.logprobs is not None:
            spelt = [self.tokenizer.decode([t]) for t in job.tokens[first:last]]
            likely = job.likely[first:last]
            told = {
                "tokens": spelt,
                "token_logprobs": [entry[0][1] for entry in likely],
                "top_logprobs": [{self.tokenizer.decode([t]): p for t, p in entry[1:]} for entry in likely],
                "text_offset": choice.offsets[first:last],
            }
        steps = [list(s) for s in job.steps[first:last]]
        return {"index": i, "text": text, "logprobs": told, "finish_reason": finish, "steps": steps}

    def usage(self, choices: list[Choice], n: int) -> dict[str, int]:
        read = sum(len(c.job.prompt) for c in choices[::n])
        written = sum(len(c.job.tokens) for c in choices)
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}

    def saved(self, choices: list[Choice]) -> dict[str, Any]:
        """What leaving early has spared."""
        steps = [s for c in choices for s in c.job.steps]
        sizes = [len(g) for g in self.model.config.groups]
        loops = choices[0].job.settings.loops
        most = len(steps) * sum(k * n for k, n in zip(loops, sizes, strict=True))
        taken = sum(k * n for s in steps for k, n in zip(s, sizes, strict=True))
        means = [sum(s[g] for s in steps) / max(1, len(steps)) for g in range(len(sizes))]
        return {"loops": list(loops), "mean_steps": means, "work_saved": 1 - taken / most if most else 0.0}

    def head(self) -> dict[str, Any]:
        return {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time()), "model": self.name}

    def metrics(self) -> str:
        """Prometheus's text format."""
        s, c = self.worker.scheduler, self.worker.scheduler.counters
        lines = []

        def tell(name: str, kind: str, words: str, *values: tuple[str, float]) -> None:
            lines.extend([f"# HELP twoscale_{name} {words}", f"# TYPE twoscale_{name} {kind}"])
            lines.extend(f"twoscale_{name}{labels} {value:g}" for labels, value in values)

        tell("waiting", "gauge", "Requests in the queue.", ("", len(s.waiting)))
        tell("running", "gauge", "Requests that are being served.", ("", len(s.running)))
        tell("refused_total", "counter", "Requests that were told to come back later.", ("", self.refused))
        tell("finished_total", "counter", "Texts that have ended.", ("", c.finished))
        tell("tokens_total", "counter", "New tokens.", ("", c.tokens))
        tell("engine_seconds_total", "counter", "Seconds in the engine.", ("", c.engine_seconds))
        tell("rows_per_call", "gauge", "Mean rows in a call.", ("", c.rows / max(1, c.calls)))
        tell("cache_bytes", "gauge", "Bytes of keys and values that are promised.", ("", s.held))
        tell("cache_bytes_limit", "gauge", "Bytes that may be promised.", ("", s.cache_bytes))
        steps = [(f'{{group="{g}"}}', n) for g, n in enumerate(c.steps)]
        tell("loop_steps_total", "counter", "Applications of each group's map to one token.", *steps)
        return "\n".join(lines) + "\n"


def _whole_characters(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def error(status: int, message: str, param: str | None = None, headers: dict[str, str] | None = None) -> JSONResponse:
    """As OpenAI's clients expect it."""
    message = message.encode("utf-8", "replace").decode()  # what came in may hold halves of characters
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": {"message": message, "type": kind, "param": param, "code": None}}, status, headers)


class Guard:
    """Who may come in, and with how much. Answers go out untouched: a middleware of Starlette's own would hand on every token twice."""

    def __init__(self, app: ASGIApp, server: Server) -> None:
        self.app, self.server = app, server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        key, limit, headers = self.server.key, self.server.limits.body, Headers(scope=scope)
        if key is not None and scope["path"].startswith("/v1/"):
            given = headers.get("authorization", "").encode()
            if not hmac.compare_digest(given, f"Bearer {key}".encode()):
                told = error(401, "give the API key as a bearer token", headers={"WWW-Authenticate": "Bearer"})
                return await told(scope, receive, send)
        size = headers.get("content-length", "0")
        if not size.isdigit() or int(size) > limit:
            return await error(413, f"a request has at most {limit} bytes")(scope, receive, send)
        body, more = b"", scope["method"] == "POST"
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body, more = body + message.get("body", b""), message.get("more_body", False)
            if len(body) > limit:
                return await error(413, f"a request has at most {limit} bytes")(scope, receive, send)
        whole: list[Message] = [{"type": "http.request", "body": body, "more_body": False}] if scope["method"] == "POST" else []

        async def again() -> Message:
            return whole.pop() if whole else await receive()

        return await self.app(scope, again, send)


def create_app(server: Server) -> FastAPI:
    """The application."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        server.worker.start()
        yield
        await asyncio.to_thread(server.worker.stop, server.limits.seconds)

    app = FastAPI(title="twoscale", lifespan=lifespan, docs_url=None, redoc_url=None)

    app.add_middleware(Guard, server=server)

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, problem: RequestValidationError) -> Response:
        first = problem.errors()[0]
        where = ".".join(str(x) for x in first.get("loc", ()) if x != "body")
        return error(400, f"{where or 'the request'}: {first.get('msg', 'is malformed')}", where or None)

    @app.exception_handler(HTTPException)
    async def plain(request: Request, problem: HTTPException) -> Response:
        return error(problem.status_code, str(problem.detail))

    @app.exception_handler(Refused)
    async def refused(request: Request, problem: Refused) -> Response:
        return error(400, str(problem), problem.param)

    @app.exception_handler(UserError)
    async def cannot(request: Request, problem: UserError) -> Response:
        return error(400, str(problem))

    @app.exception_handler(Failed)
    async def failed(request: Request, problem: Failed) -> Response:
        return error(500, str(problem))

    @app.exception_handler(Busy)
    async def busy(request: Request, problem: Busy) -> Response:
        server.refused += 1
        return error(503 if server.worker.stopping else 429, str(problem), headers={"Retry-After": "1"})

    @app.get("/health")
    async def health() -> Response:
        failure = server.worker.failure
        return JSONResponse({"status": "ok" if failure is None else "failed"}, 200 if failure is None else 503)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> str:
        return server.metrics()

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        entry = {"id": server.name, "object": "model", "created": server.started, "owned_by": "twoscale"}
        return {"object": "list", "data": [entry]}

    @app.post("/v1/completions", response_model=None)
    async def completions(given: CompletionRequest, request: Request) -> Response:
        choices = server.open(given)
        for c in choices:
            server.worker.scheduler.check(c.job)
        if given.stream:
            return StreamingResponse(await _started(_events(server, given, choices)), media_type="text/event-stream")
        return await _whole(server, given, choices, request)

    return app


async def _whole(server: Server, given: CompletionRequest, choices: list[Choice], request: Request) -> Response:
    """The answer in one piece; a client that goes away is not waited for."""

    async def collect() -> None:
        async for _ in server.news(choices):
            pass

    work = asyncio.ensure_future(collect())
    try:
        while not work.done():
            await asyncio.wait([work], timeout=0.1)
            if not work.done() and await request.is_disconnected():
                return Response(status_code=499)
        await work
    except TimeoutError:
        return error(504, f"not done within {server.limits.seconds:g} seconds")
    finally:
        work.cancel()
    told = [server.choice(i, c, c.text, 0, len(c.job.tokens), c.finish) for i, c in enumerate(choices)]
    body = {**server.head(), "choices": told, "usage": server.usage(choices, given.n), "twoscale": server.saved(choices)}
    return JSONResponse(body)


async def _events(server: Server, given: CompletionRequest, choices: list[Choice]) -> AsyncIterator[str]:
    """The answer token by token, as server-sent events."""
    head = server.head()

    def event(body: dict[str, Any]) -> str:
        return f"data: {json.dumps(body)}\n\n"

    try:
        async for i, text, first, last in server.news(choices):
            c = choices[i]
            if text or c.finish is not None or last > first:
                yield event({**head, "choices": [server.choice(i, c, text, first, last, c.finish)]})
        if (given.stream_options or {}).get("include_usage"):
            yield event({**head, "choices": [], "usage": server.usage(choices, given.n), "twoscale": server.saved(choices)})
        yield "data: [DONE]\n\n"
    except TimeoutError:
        yield event({"error": {"message": f"not done within {server.limits.seconds:g} seconds", "type": "server_error"}})
    except Failed as problem:
        yield event({"error": {"message": str(problem), "type": "server_error"}})


async def _started(events: AsyncIterator[str]) -> AsyncIterator[str]:
    """The events with the first one already there, so that what is refused is refused by status and not inside the stream."""
    first = await anext(events)

    async def rest() -> AsyncIterator[str]:
        try:
            yield first
            async for event in events:
                yield event
        finally:
            await events.aclose()  # type: ignore[attr-defined]

    return rest()
