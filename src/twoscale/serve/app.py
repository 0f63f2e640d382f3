"""The HTTP API: /v1/completions and /v1/models as OpenAI's clients expect them, /health and /metrics (FastAPI, the extra `serve`)."""

import asyncio
import hmac
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from twoscale.config import UserError
from twoscale.serve.api import CompletionRequest, InvalidRequest
from twoscale.serve.limits import Limits
from twoscale.serve.scheduler_thread import InternalError, Unavailable
from twoscale.serve.server import Choice, Server

T = TypeVar("T")
PUBLIC_PATHS = ("/health",)  # need no API key
ENDPOINTS = "there are POST /v1/completions, GET /v1/models, GET /health and GET /metrics"
NO_CHAT = "this is a base model without a chat template: send its text to /v1/completions"


def error(status: int, message: str, param: str | None = None, headers: dict[str, str] | None = None) -> JSONResponse:
    """An error response in OpenAI's format."""
    message = message.encode("utf-8", "replace").decode()  # the message may quote lone surrogates
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": {"message": message, "type": kind, "param": param, "code": None}}, status, headers)


class GuardSettings(Protocol):
    """The settings of RequestGuard: a Server, or the Proxy of several."""

    key: str | None
    """The API key; None: none is needed."""
    limits: Limits


class RequestGuard:
    """ASGI middleware that checks the API key and the size of the body.

    Not a Starlette BaseHTTPMiddleware, which would add overhead to every streamed token."""

    def __init__(self, app: ASGIApp, settings: GuardSettings) -> None:
        self.app, self.settings = app, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        key, limit, headers = self.settings.key, self.settings.limits.max_body, Headers(scope=scope)
        if key is not None and scope["path"] not in PUBLIC_PATHS:
            scheme, _, token = headers.get("authorization", "").partition(" ")
            if not hmac.compare_digest(token.strip().encode("latin-1"), key.encode()) or scheme.lower() != "bearer":
                refusal = error(401, "give the API key as a bearer token", headers={"WWW-Authenticate": "Bearer"})
                return await refusal(scope, receive, send)
        size = headers.get("content-length", "0")
        if not size.isdigit() or int(size) > limit:
            return await error(413, f"a request has at most {limit} bytes")(scope, receive, send)
        content, more = b"", scope["method"] == "POST"
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            content, more = content + message.get("body", b""), message.get("more_body", False)
            if len(content) > limit:
                return await error(413, f"a request has at most {limit} bytes")(scope, receive, send)
        complete: list[Message] = [{"type": "http.request", "body": content, "more_body": False}] if scope["method"] == "POST" else []

        async def receive_again() -> Message:
            return complete.pop() if complete else await receive()

        return await self.app(scope, receive_again, send)


def create_app(server: Server) -> FastAPI:
    """The FastAPI application of a server."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        server.scheduler_thread.start()
        yield
        await asyncio.to_thread(server.scheduler_thread.stop, server.limits.timeout)

    app = FastAPI(title="twoscale", lifespan=lifespan, docs_url=None, redoc_url=None)

    app.state.connections = server.connections
    app.add_middleware(RequestGuard, settings=server)

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, problem: RequestValidationError) -> Response:
        first = problem.errors()[0]
        if first.get("type") == "unknown_field":
            return error(400, first["msg"], first["ctx"]["field"])
        where = ".".join(str(x) for x in first.get("loc", ()) if x != "body")
        return error(400, f"{where or 'the request'}: {first.get('msg', 'is malformed')}", where or None)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, problem: HTTPException) -> Response:
        if problem.status_code not in (404, 405):
            return error(problem.status_code, str(problem.detail))
        requested = f"{request.method} {request.url.path[:100]} is not served here"
        return error(
            problem.status_code,
            f"{requested}: {NO_CHAT if '/chat/' in request.url.path else ENDPOINTS}",
            headers=dict(problem.headers or {}),
        )

    @app.exception_handler(InvalidRequest)
    async def invalid_request(request: Request, problem: InvalidRequest) -> Response:
        return error(problem.status, str(problem), problem.param)

    @app.exception_handler(UserError)
    async def user_error(request: Request, problem: UserError) -> Response:
        return error(400, str(problem))

    @app.exception_handler(InternalError)
    async def internal_error(request: Request, problem: InternalError) -> Response:
        return error(500, str(problem))

    @app.exception_handler(Unavailable)
    async def unavailable(request: Request, problem: Unavailable) -> Response:
        server.n_rejected += 1
        down = server.scheduler_thread.stopping or server.scheduler_thread.failure is not None
        return error(503 if down else 429, str(problem), headers={"Retry-After": "1"})

    @app.exception_handler(TimeoutError)
    async def timed_out(request: Request, problem: TimeoutError) -> Response:
        return error(504, f"not done within {server.limits.timeout:g} seconds")

    @app.get("/health")
    async def health() -> Response:
        failure = server.scheduler_thread.failure
        return JSONResponse({"status": "ok" if failure is None else "failed"}, 200 if failure is None else 503)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> str:
        return server.metrics()

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [server.model_entry()]}

    @app.get("/v1/models/{name:path}", response_model=None)
    async def model(name: str) -> Response:
        return JSONResponse(server.model_entry()) if name == server.name else error(404, f"there is no model {name!r} here", "model")

    @app.post("/v1/completions", response_model=None)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        server.scheduler_thread.check_queue(1)
        choices = server.make_choices(body)
        if body.stream:
            return await _stream_response(_events(server, body, choices), request)
        return await _complete_response(server, body, choices, request)

    return app


async def or_disconnect(work: Awaitable[T], request: Request) -> T:
    """The result of `work`. If the client disconnects first, `work` is cancelled and ClientDisconnect is raised."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return await working
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _complete_response(server: Server, body: CompletionRequest, choices: list[Choice], request: Request) -> Response:
    """The whole answer in one response."""

    async def collect() -> None:
        async for _ in server.stream_choices(choices):
            pass

    try:
        await or_disconnect(collect(), request)
    except ClientDisconnect:
        return Response(status_code=499)
    completions = [server.choice_json(i, c, c.text) for i, c in enumerate(choices)]
    return JSONResponse(
        {
            **server.response_fields(),
            "choices": completions,
            **server.summary(choices, body.n_per_prompt),
        }
    )


async def _events(server: Server, body: CompletionRequest, choices: list[Choice]) -> AsyncGenerator[str]:
    """The answer as server-sent events, token by token. An error before the first event is raised; a later one is sent as an event."""
    shared, started = server.response_fields(), False

    def event(content: dict[str, Any]) -> str:
        return f"data: {json.dumps(content)}\n\n"

    try:
        async for i, text, first in server.stream_choices(choices):
            c = choices[i]
            if text or c.finish_reason is not None or c.n_tokens > first:
                yield event({**shared, "choices": [server.choice_json(i, c, text, first)]})
                started = True
        if body.stream_options is not None and body.stream_options.include_usage:
            yield event({**shared, "choices": [], **server.summary(choices, body.n_per_prompt)})
        yield "data: [DONE]\n\n"
    except (TimeoutError, InternalError) as problem:
        if not started:
            raise
        timed_out = isinstance(problem, TimeoutError)
        message = f"not done within {server.limits.timeout:g} seconds" if timed_out else str(problem)
        yield event({"error": {"message": message, "type": "server_error"}})


async def _stream_response(events: AsyncGenerator[str], request: Request) -> Response:
    """A streaming response. It begins after the first event, so that an early error has an HTTP status of its own."""

    async def rest(first: str) -> AsyncIterator[str]:
        try:
            yield first
            async for event in events:
                yield event
        finally:
            await events.aclose()

    try:
        first = await or_disconnect(anext(events), request)
    except ClientDisconnect:
        await events.aclose()
        return Response(status_code=499)
    return StreamingResponse(rest(first), media_type="text/event-stream")
