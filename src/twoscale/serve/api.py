"""The schema of a completion request, and its conversion to engine requests. Fields are OpenAI's, vLLM's `top_k` and `stop_token_ids`, and
`exit`, `tau`, `loops`, `kv`, `speculate`."""

import difflib
import secrets
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, model_validator
from pydantic_core import PydanticCustomError

from twoscale import exits
from twoscale.config import UserError
from twoscale.config.dtypes import KVDtype
from twoscale.engine.cache import parse_kv
from twoscale.engine.request import LoopParams, Request, RequestGroup, SamplingParams, loop_params
from twoscale.engine.speculation import OFF, Speculation, check_speculation
from twoscale.model import LoopedGPT

MAX_N, MAX_STOPS, MAX_STOP_IDS, MAX_PROMPTS, MAX_SEQUENCES = 16, 8, 64, 16, 64
SCHEMA_MAX_LOOPS = 256  # larger numbers are malformed; `Server.max_loops` is the limit of a server
Token = Annotated[int, Field(ge=0, lt=2**31)]
Tokens = Annotated[list[Token], Field(fail_fast=True)]
StopString = Annotated[str, Field(max_length=200)]
LoopCount = Annotated[int, Field(ge=1, le=SCHEMA_MAX_LOOPS)]
Number = FiniteFloat | int


class StrictModel(BaseModel):
    """A pydantic model that accepts no unknown fields and converts no types."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, body: Any) -> Any:
        """Refuse the first unknown field by name, with the closest known one. Pydantic alone would list all of them."""
        unknown = next((name for name in body if name not in cls.model_fields), None) if isinstance(body, dict) else None
        if unknown is None:
            return body
        near = difflib.get_close_matches(str(unknown)[:40], cls.model_fields, n=1)
        known = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(cls.model_fields)}"
        raise PydanticCustomError(
            "unknown_field", "{words}", {"words": f"unknown field {str(unknown)[:100]!r}: {known}", "field": str(unknown)[:100]}
        )


class StreamOptions(StrictModel):
    """`stream_options` of a request."""

    include_usage: bool | None = False
    include_obfuscation: bool | None = Field(None, description="accepted, without effect")


class CompletionRequest(StrictModel):
    """The body of POST /v1/completions."""

    model: str = Field("", max_length=200)
    prompt: str | Tokens | Annotated[list[str], Field(fail_fast=True)] | Annotated[list[Tokens], Field(fail_fast=True)] = Field(...)
    max_tokens: int | None = Field(16, ge=1, le=1_000_000)
    temperature: Number | None = Field(1.0, ge=0, le=2)
    top_p: Number | None = Field(1.0, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31, description="sample from the k most likely tokens; 0 and -1: from all")
    n: int | None = Field(1, ge=1, le=MAX_N)
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    logprobs: int | None = Field(None, ge=0, le=5)
    echo: Literal[False] | None = False
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[Token], Field(max_length=MAX_STOP_IDS, fail_fast=True)] | None = None
    suffix: Literal[""] | None = Field(None, description="not supported: empty or null")
    best_of: int | None = Field(None, ge=1, le=MAX_N, description="not supported: at most `n`, or null")
    presence_penalty: Number | None = Field(0, ge=0, le=0, description="not supported: 0 or null")
    frequency_penalty: Number | None = Field(0, ge=0, le=0, description="not supported: 0 or null")
    logit_bias: Annotated[dict[str, Any], Field(max_length=0)] | None = Field(None, description="not supported: empty or null")
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    user: Annotated[str, Field(max_length=1000)] | None = Field(None, description="accepted, without effect")
    metadata: dict[str, Any] | None = Field(None, description="accepted, without effect")
    store: bool | None = Field(None, description="accepted, without effect")
    exit: str | None = Field(None, max_length=200, description="`auto` (as calibrated), `none`, NAME or NAME:VALUE,setting=value")
    tau: Number | None = Field(None, ge=0, le=1e9, description="threshold of the rule, if `exit` names it without a value")
    loops: LoopCount | Annotated[list[LoopCount], Field(max_length=64, fail_fast=True)] | None = None
    kv: Annotated[str, Field(max_length=20)] = "exact"
    speculate: Annotated[str, Field(max_length=20)] | None = Field(
        None, description="`off`, `auto`, `wavefront`, `draft:m`, `lookup:n`; by default the server's"
    )

    @property
    def n_per_prompt(self) -> int:
        """Completions of each prompt."""
        return self.n or 1

    def stop_strings(self) -> list[str]:
        """`stop` as a list, without empty strings."""
        stop_strings = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [stop_string for stop_string in stop_strings if stop_string]


class InvalidRequest(UserError):
    """A request that cannot be served: the HTTP status, and the parameter at fault."""

    def __init__(self, message: str, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param, self.status = param, status


def engine_requests(
    body: CompletionRequest,
    prompts: list[list[int]],
    model: LoopedGPT,
    eot: int,
    calibration: tuple[Any, int] | None,
    max_loops: int,
    speculate: Speculation = OFF,
    kv_dtype: KVDtype = "auto",
) -> list[Request]:
    """The requests to the engine, n for each prompt. `calibration` has the model's calibrated rules and loops, `speculate` the default."""
    if body.best_of is not None and body.best_of > body.n_per_prompt:
        raise InvalidRequest("best_of is not supported", "best_of")
    if len(prompts) * body.n_per_prompt > MAX_SEQUENCES:
        raise InvalidRequest(f"at most {MAX_SEQUENCES} completions (prompts times n) in a request", "n")
    params = replace(parse_loop_params(body, model, calibration, max_loops), kv_dtype=kv_dtype)
    try:
        speculate = check_speculation(speculate if body.speculate is None else body.speculate, model.config, params)
    except UserError as error:
        if body.speculate is not None:
            raise InvalidRequest(str(error), "speculate") from None
        speculate = OFF  # the server's default does not fit this request
    stop_token_ids = body.stop_token_ids or []
    if max(stop_token_ids, default=0) >= model.config.vocab_size:
        raise InvalidRequest(f"token {max(stop_token_ids)} does not exist, the vocabulary has {model.config.vocab_size}", "stop_token_ids")
    sampling = SamplingParams(
        temperature=1.0 if body.temperature is None else float(body.temperature),
        top_k=body.top_k if body.top_k and body.top_k > 0 else None,
        top_p=float(body.top_p or 1.0),
        seed=secrets.randbits(63) if body.seed is None else body.seed,
        stop_token_ids=frozenset({eot, *stop_token_ids}),
        stop=tuple(body.stop_strings()),
        logprobs=body.logprobs,
    )
    size, request_group, requests = model.config.block_size, RequestGroup(), []
    for ids in prompts:
        if not ids:
            raise InvalidRequest("the prompt is empty", "prompt")
        if max(ids) >= model.config.vocab_size:
            raise InvalidRequest(f"token {max(ids)} does not exist, the vocabulary has {model.config.vocab_size}", "prompt")
        if len(ids) > size:
            raise InvalidRequest(f"the prompt has {len(ids)} tokens, the context {size}", "prompt")
        prompt_sampling = replace(sampling, max_new_tokens=min(body.max_tokens or size, size - len(ids) + 1))
        requests += [
            Request(ids, prompt_sampling, params, i, request_group=request_group, speculate=speculate) for i in range(body.n_per_prompt)
        ]
    return requests


def parse_loop_params(body: CompletionRequest, model: LoopedGPT, calibration: tuple[Any, int] | None, max_loops: int) -> LoopParams:
    """The loop parameters of a request: exit rules, loops and kv."""
    rule: Any = body.exit
    loops: Any = body.loops
    if not model.config.n_groups and (loops is not None or body.tau is not None or rule not in (None, "none")):
        raise InvalidRequest("this model has no loops: leave out exit, tau and loops", "loops" if loops is not None else "exit")
    if rule in (None, "auto") and calibration is not None and body.tau is None:
        rule, loops = calibration[0], loops or calibration[1]
    elif rule == "auto":
        raise InvalidRequest(f"this model was not calibrated with weights in {model.weight_dtype}: name a rule", "exit")
    elif rule in (None, "none"):
        if body.tau is not None:
            raise InvalidRequest("tau is the threshold of an exit rule, but exit names none: name one, for example acceleration", "tau")
        rule = None
    elif body.tau is not None:
        if ":" in rule:
            raise InvalidRequest("tau is given twice, in exit and in tau", "tau")
        rule = f"{rule}:{float(body.tau)!r}"
    param = "kv"
    try:
        parse_kv(body.kv)
        param = "loops"
        if body.loops is not None and max(model.config.loops_for(loops), default=0) > max_loops:
            raise UserError(f"at most {max_loops} loops are served")
        param = "exit"
        if isinstance(rule, str) and exits.rule_class(rule) is exits.Learned:
            raise UserError("a learned rule has its weights in a file, which a request may not name")
        return loop_params(model, exit=rule, loops=loops, kv=body.kv)
    except (UserError, TypeError, ValueError, OverflowError) as error:
        raise InvalidRequest(str(error), param) from None
