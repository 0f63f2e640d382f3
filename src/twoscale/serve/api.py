"""What comes in, as OpenAI's clients send it, with our additions: `exit`, `tau`, `loops` and `kv`."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from twoscale import exits
from twoscale.config import UserError
from twoscale.engine.sample import Sampling
from twoscale.exits import plan
from twoscale.model import LoopedGPT
from twoscale.serve.job import Job, Settings

MOST_N, MOST_STOPS, MOST_PROMPTS, MOST_LOOPS = 16, 8, 16, 256
Token = Annotated[int, Field(ge=0, lt=2**31)]
Word = Annotated[str, Field(max_length=200)]
Count = Annotated[int, Field(ge=1, le=MOST_LOOPS)]


class CompletionRequest(BaseModel):
    """A request for /v1/completions."""

    model_config = ConfigDict(extra="ignore", strict=True)

    model: str = Field("", max_length=200)
    prompt: str | list[Token] | list[str] | list[list[Token]] = Field(...)
    max_tokens: int = Field(16, ge=1, le=1_000_000)
    temperature: FiniteFloat | int | None = Field(1.0, ge=0, le=2)
    top_p: FiniteFloat | int | None = Field(1.0, gt=0, le=1)
    n: int = Field(1, ge=1, le=MOST_N)
    stream: bool = False
    stream_options: dict[str, bool] | None = None
    logprobs: int | None = Field(None, ge=0, le=5)
    echo: Literal[False] = False
    stop: Word | Annotated[list[Word], Field(max_length=MOST_STOPS)] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    exit: str | None = Field(None, max_length=200, description="`auto` (as calibrated), `none`, NAME or NAME:VALUE,setting=value")
    tau: FiniteFloat | int | None = Field(None, ge=0, le=1e9, description="threshold, where `exit` is a name alone")
    loops: Count | Annotated[list[Count], Field(max_length=64)] | None = None
    kv: Annotated[str, Field(max_length=20)] = "exact"

    def stops(self) -> list[str]:
        found = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [word for word in found if word]


class Refused(UserError):
    """A request that cannot be served, with the name of what is wrong."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


def jobs_of(
    given: CompletionRequest, prompts: list[list[int]], model: LoopedGPT, eot: int, calibrated: tuple[Any, int] | None, most_loops: int
) -> list[Job]:
    """The jobs of a request: n for each prompt."""
    settings = settings_of(given, model, calibrated, most_loops)
    temperature = 1.0 if given.temperature is None else float(given.temperature)
    sampling = Sampling(temperature, None, float(given.top_p or 1.0), given.seed or 0)
    size = model.config.block_size
    jobs = []
    for ids in prompts:
        if not ids:
            raise Refused("the prompt is empty", "prompt")
        if max(ids) >= model.config.vocab_size:
            raise Refused(f"token {max(ids)} does not exist, the vocabulary has {model.config.vocab_size}", "prompt")
        if len(ids) > size:
            raise Refused(f"the prompt has {len(ids)} tokens, the context {size}", "prompt")
        most = min(given.max_tokens, size - len(ids) + 1)
        for i in range(given.n):
            jobs.append(Job(ids, most, settings, sampling, frozenset({eot}), stream=i, logprobs=given.logprobs))
    return jobs


def settings_of(given: CompletionRequest, model: LoopedGPT, calibrated: tuple[Any, int] | None, most_loops: int) -> Settings:
    """Rule, loops and cache of a request."""
    rule: Any = given.exit
    loops: Any = given.loops
    if rule in (None, "auto") and calibrated is not None and given.tau is None:
        rule, loops = calibrated[0], loops or calibrated[1]
    elif rule == "auto":
        raise Refused("this model was not calibrated: name a rule", "exit")
    elif rule in (None, "none"):
        if given.tau is not None:
            raise Refused("tau goes with a rule: name it in exit", "tau")
        rule = None
    elif given.tau is not None:
        if ":" in rule:
            raise Refused("tau is given twice, in exit and in tau", "tau")
        rule = f"{rule}:{float(given.tau)!r}"
    try:
        if isinstance(rule, str) and "file=" in rule:
            raise UserError("a rule by request cannot read files")
        rules = plan(rule, model.config.n_groups)
        if any(isinstance(r, exits.Gate) for r in rules) and not model.config.exit_gate:
            raise UserError("this model has no learned gate")
        counts = model.config.loops_for(loops)
        if max(counts, default=0) > most_loops:
            raise UserError(f"at most {most_loops} loops are served")
        settings = Settings(rules, counts, given.kv, 0)
    except UserError as error:
        raise Refused(str(error), "exit" if given.exit else "loops") from None
    return settings
