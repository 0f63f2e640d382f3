# mypy: ignore-errors
# the harness is an extra, and mostly without annotations
"""EleutherAI's lm-evaluation-harness on looped models (the extra `eval`), with fixed loops or an exit rule.

lm = HarnessModel(model, tokenizer, loops=30, exit="acceleration:0.05")
results = evaluate(lm, ["lambada"], include="my/tasks", limit=100)
lm.mean_steps      # in each group, over all tokens that were read
"""

import contextlib
import logging
import sys
from pathlib import Path
from typing import Any

import torch
from lm_eval import simple_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from twoscale.config import UserError
from twoscale.data import Tokenizer
from twoscale.engine import Request, SamplingParams, forward, loop_params
from twoscale.engine.generate import offline_scheduler, track_tokens
from twoscale.engine.request import RequestGroup
from twoscale.engine.scheduler import run_until_done
from twoscale.exits import Exit
from twoscale.model import LoopedGPT

LOGITS = 1 << 24  # logits that are held at a time


class HarnessModel(TemplateLM):
    """A looped model as the harness wants it."""

    def __init__(self, model: LoopedGPT, tokenizer: Tokenizer, loops: int | None = None, exit: Exit | None = None, batch: int = 16) -> None:
        super().__init__()
        self.looped, self.own_tokenizer, self.loops, self.exit, self.batch = model, tokenizer, loops, exit, batch
        self.room = model.config.block_size
        self.steps = torch.zeros(model.config.n_groups, dtype=torch.float64)
        self.tokens = 0

    @property
    def mean_steps(self) -> list[float]:
        """Steps in each group, over all tokens so far."""
        return (self.steps / max(1, self.tokens)).tolist()

    @property
    def eot_token_id(self) -> int:
        return self.own_tokenizer.eot

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **ignored: Any) -> list[int]:
        return self.own_tokenizer.encode(string, special=add_special_tokens is not False)

    def _loglikelihood_tokens(self, requests, disable_tqdm: bool = False, **ignored: Any) -> list[tuple[float, bool]]:
        """For each (_, context, continuation): log p(continuation | context), and whether it is what greedy decoding would write.

        A text longer than the context loses tokens on its left.
        """
        texts = []
        for _, context, continuation in requests:
            whole = (list(context) + list(continuation))[-(self.room + 1) :]
            texts.append((whole[:-1], list(continuation)[-self.room :]))
        found: dict[int, tuple[float, bool]] = {}
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i][0]))
        longest = len(texts[order[0]][0]) if order else 1
        batch = max(1, min(self.batch, LOGITS // (longest * self.looped.config.vocab_size)))
        for first in range(0, len(order), batch):
            rows = order[first : first + batch]
            out = forward(self.looped, [texts[i][0] for i in rows], exit=self.exit, loops=self.loops)
            self.steps += out.steps.double().sum(dim=(0, 1)).cpu()
            self.tokens += sum(len(texts[i][0]) for i in rows)
            for row, i in enumerate(rows):
                ids, continuation = texts[i]
                logits = out.logits[row, len(ids) - len(continuation) : len(ids)]
                wanted = torch.tensor(continuation, device=logits.device)
                logprobs = torch.log_softmax(logits, dim=-1).gather(1, wanted[:, None])
                found[i] = float(logprobs.double().sum()), bool((logits.argmax(dim=-1) == wanted).all())
        return [found[i] for i in range(len(texts))]

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
        totals = []
        for request in requests:
            (text,) = request.args
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(text, add_special_tokens=False),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.room,
                context_len=1,
            )
            pieces = [(("", ""), *make_disjoint_window(pair)) for pair in windows]
            totals.append(sum(value for value, _ in self._loglikelihood_tokens(pieces)))
        return totals

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        params, request_group = loop_params(self.looped, exit=self.exit, loops=self.loops), RequestGroup()
        own, streams = [], []
        for request in requests:
            prompt, options = request.args
            stops = options.get("until") or []
            stops = [stops] if isinstance(stops, str) else stops
            new = min(int(options.get("max_gen_toks", 64)), self.room // 2)
            ids = self.tok_encode(prompt)[-(self.room - new) :] or [self.eot_token_id]
            temperature = float(options.get("temperature", 0.0)) if options.get("do_sample") else 0.0
            sampling = SamplingParams(
                temperature,
                max_new_tokens=new,
                stop_token_ids=frozenset({self.eot_token_id}),
                stop=tuple(stop for stop in stops if stop),
            )
            own.append(Request(ids, sampling, params, request_group=request_group))
            streams.append(track_tokens(own[-1], self.own_tokenizer))
        run_until_done(offline_scheduler(self.looped), own)
        for request in own:
            taken = torch.tensor(request.prompt_steps + request.steps[1:], dtype=torch.float64)
            self.steps += taken.sum(dim=0)
            self.tokens += len(taken)
        return [stream.text for stream in streams]


def _task_manager(tasks: list[str], include: Path | None) -> tuple[TaskManager, set[str]]:
    """A manager that knows the tasks, and the names of all tasks it knows. The harness's own tasks are thousands of files and take ten
    seconds to read, so they are read only where the folder `include` has not all of the tasks."""
    if include is not None:
        manager = TaskManager(include_path=str(include), include_defaults=False)
        if set(tasks) <= set(manager.all_tasks):
            return manager, set(manager.all_tasks)
    manager = TaskManager(include_path=None if include is None else str(include))
    return manager, set(manager.all_tasks)


def evaluate(
    lm: HarnessModel, tasks: list[str], include: Path | None = None, limit: int | None = None, num_fewshot: int | None = None
) -> dict[str, Any]:
    """Results of the tasks, by name: every number that the harness reports. `num_fewshot` None leaves it to each task."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    manager, known = _task_manager(tasks, include)
    if missing := [task for task in tasks if task not in known]:
        where = f" or in {include}" if include is not None else "; folders with your own are named with --include"
        raise UserError(f"there is no task {missing[0]!r} in the harness{where}")
    try:
        with contextlib.redirect_stdout(sys.stderr):  # the harness prints remarks
            results = simple_evaluate(
                lm,
                tasks=tasks,
                task_manager=manager,
                limit=limit,
                num_fewshot=num_fewshot,
                bootstrap_iters=1000,
                log_samples=False,
            )
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"the harness could not run {', '.join(tasks)}: {str(error).splitlines()[0]}") from None
    assert results is not None
    return {
        task: {
            key.removesuffix(",none"): value
            for key, value in numbers.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
        for task, numbers in results["results"].items()
    }
