"""The scheduler: drives all decoding. It admits requests, forms batches and samples tokens until all requests are done.

    scheduler = Scheduler(model)
    scheduler.add(request)
    while scheduler.step():
        pass
    request.tokens

The result of a request does not depend on other requests: rows attend to their own sequence only, the kernels sum in a fixed order, and
all parameters belong to the request. `policy` decides which rows share a stage pass, `fair` which requests go first and how much of the
batches and the cache a request group may use.
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from twoscale.config import UserError
from twoscale.engine.batch import Batch, Chunk, Entry
from twoscale.engine.budget import SchedulerStepBudget
from twoscale.engine.cache import bytes_per_token
from twoscale.engine.counters import Counters
from twoscale.engine.engine import Engine
from twoscale.engine.fair import QUANTUM, FairAdmission, select_for_batch
from twoscale.engine.kernels import InferenceCopy, KernelName
from twoscale.engine.kernels.base import Interrupt
from twoscale.engine.policy import policy_of
from twoscale.engine.request import Request, SamplingKey
from twoscale.engine.sample import Sampled, sample
from twoscale.engine.single import SingleRequest
from twoscale.engine.speculation import OFF
from twoscale.engine.speculator import Speculator
from twoscale.engine.wavefront import Wave
from twoscale.model import LoopedGPT

LOG = logging.getLogger("twoscale")
PREFILL_CHUNK = 64  # chunked prefill, so that requests in decode do not wait long: see `Scheduler`
MAX_LEAD_TOKEN_COSTS = 2.0
"""How far all batches may be ahead of an unbatched request (a running one without tokens in a batch) before it starts a batch of its own.

"Ahead" is the difference of virtual times, in units of the cost of one token: the layers that a token runs through at the default number of
loops."""
NOT_FINITE = "the model's logits are not finite: its weights hold NaN or infinity, or its start states do"


class Scheduler:
    """Requests may be added from any thread; `step` must be called from one thread."""

    def __init__(
        self,
        model: LoopedGPT,
        policy: str = "lockstep",
        *,
        max_num_seqs: int = 32,
        cache_bytes: float = 1 << 30,
        prefill_chunk: int = PREFILL_CHUNK,
        isolate_errors: bool = True,
        kernels: KernelName = "auto",
        inference_copy: InferenceCopy | None = None,
    ) -> None:
        """A batch has at most `max_num_seqs` sequences, and the caches of running requests take at most `cache_bytes`.

        `prefill_chunk` is the number of prompt tokens that a sequence runs at a time; with kv other than `exact` it runs its whole prompt.
        Prompts are added to a batch, one chunk each, until the batch has at least `prefill_chunk` prompt tokens. With `isolate_errors` an
        exception ends the request that caused it, or its batch if that is not known, and the others go on; without it `step` raises it.
        `inference_copy` is as for `Engine`.
        """
        self.engine, self.policy = Engine(model, kernels=kernels, inference_copy=inference_copy), policy_of(policy)
        self.max_num_seqs, self.cache_bytes, self.prefill_chunk = max_num_seqs, cache_bytes, prefill_chunk
        self.isolate_errors = isolate_errors
        self.counters = Counters(loop_steps=self.engine.loop_steps)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.fair = FairAdmission()
        self.batches: list[Batch] = []
        self.peak_cache_bytes = 0
        """Peak memory of the caches of all running requests."""
        layers = [len(stage) * (1 if group is None else model.config.mean_loops) for stage, group in model.config.stages]
        self._max_lead = MAX_LEAD_TOKEN_COSTS * sum(layers)
        """MAX_LEAD_TOKEN_COSTS in units of virtual time."""
        self._in_batch: set[Request] = set()
        """The running requests that have tokens in a batch; the others are unbatched."""
        self._speculators: dict[Request, Speculator] = {}
        """The running requests that speculate."""
        self._single: SingleRequest | None = None
        """The request that decodes alone now."""
        self._new_arrivals = Interrupt()
        self._lock = threading.Lock()

    # -- requests ------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Put a request at the end of the queue; UserError if it can never be served."""
        self.check(request)
        with self._lock:
            self.waiting.append(request)
            self._new_arrivals.set(True)

    def check(self, request: Request) -> None:
        """UserError if a request can never be served."""
        config, n, new = self.engine.config, len(request.prompt), request.sampling.max_new_tokens
        if not n:
            raise UserError("the prompt is empty: give at least one token")
        if request.capacity > config.block_size:
            max_new = config.block_size - n + 1  # the last new token is never fed to the network
            hint = f"ask for at most {max_new} new ones, or shorten the prompt" if max_new > 0 else "shorten the prompt"
            raise UserError(f"a prompt of {n} tokens and {new} new ones do not fit the context of {config.block_size} tokens: {hint}")
        if self._bytes(request) > self.cache_bytes:
            raise UserError("this request needs more memory for keys and values than there is: ask for fewer tokens or loops")

    @property
    def reserved_bytes(self) -> int:
        """Cache bytes that the running requests need at their full length."""
        return self.fair.reserved.total()

    def remove_all(self) -> list[Request]:
        """Remove all requests and return them."""
        with self._lock:
            requests = [*self.running, *self.waiting]
            self.running, self.waiting, self.batches = [], deque(), []
            self._in_batch, self._speculators, self._single = set(), {}, None
        return requests

    def _bytes(self, request: Request) -> int:
        """Cache bytes of a request at its full length and depth."""
        return request.capacity * bytes_per_token(self.engine.config, request.loop_params, self.engine.kv_itemsize(request.loop_params))

    def _can_speculate(self, request: Request) -> bool:
        """Whether a request asks for speculation and the result is sure to be the same."""
        exact = self.engine.kernels.batch_invariant and request.speculate.problem(self.engine.config, request.loop_params) is None
        return request.speculate != OFF and exact

    # -- stepping ------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Admit requests, then run some stage passes of a batch, or decode the only request; False if there is nothing to do."""
        self._drop_cancelled()
        self._admit()
        if not self.running:
            return False
        involved: Sequence[Request] = ()
        try:
            if self._decode_alone():
                return True
            batch, until_virtual_time = self._next_batch()
            involved = [chunk.request for chunk in batch.chunks if chunk.request is not None]
            done = self._advance(batch, until_virtual_time)
            self._handle_failures(batch)
            self._append_tokens(chunk for chunk in done if chunk.request in self.running)
        except Exception as error:  # the cause may be any request of this batch
            if not self.isolate_errors:
                raise
            if not isinstance(error, UserError):
                LOG.exception("a pass of the engine has failed")
            self._fail(involved or list(self.running), error)
        return True

    def _decode_alone(self) -> bool:
        """Decode tokens of the only running request in one call of a kernel; False if there are others, or the kernels cannot."""
        request = self.running[0]
        if len(self.running) > 1 or self.batches or request.in_prefill:
            return False
        if self._single is None or self._single.request is not request:
            self._single = SingleRequest(self.engine, request, self._speculators.get(request), self.counters)
        single, n_before = self._single, len(request.tokens)
        computed = single.decode(self._new_arrivals)
        try:
            for token, steps in zip(computed.tokens, computed.steps, strict=False):
                self._append_token(request, token, None, steps)
                if request.finish_reason or request.cancelled:
                    break
        finally:  # a callback may raise
            single.appended(computed, len(request.tokens) - n_before)
        self.fair.virtual_time = max(self.fair.virtual_time, request.request_group.virtual_time)
        if request.finish_reason:
            self._finish(request, request.finish_reason)
        return bool(computed.tokens)

    def _next_batch(self) -> tuple[Batch, float]:
        """The batch to compute next, and the virtual time at which another batch is to be chosen.

        Unbatched requests form a new batch if there is none, or if all batches are ahead of one of them by more than `_max_lead`.
        Otherwise they join the chosen batch if the policy allows it, else they wait.
        """
        self._start_waves()
        unbatched = [request for request in self.running if request not in self._in_batch]
        virtual_times = {batch: min(group.virtual_time for group in batch.request_groups()) for batch in self.batches}
        first = min(self.batches, key=lambda batch: virtual_times[batch], default=None)
        if unbatched and (first is None or min(r.request_group.virtual_time for r in unbatched) + self._max_lead < virtual_times[first]):
            first = Batch(self.engine)
            self._start_tokens(first, select_for_batch(unbatched, max(1, self.max_num_seqs - len(self._in_batch))))
            self.batches.append(first)
            virtual_times[first] = min(group.virtual_time for group in first.request_groups())
            unbatched = [request for request in unbatched if request not in self._in_batch]
        elif unbatched and first is not None and self.policy.joins_running_batch and not isinstance(first, Wave):
            in_batch = [chunk.request for chunk in first.chunks if chunk.request is not None]
            self._start_tokens(first, select_for_batch(unbatched, max(0, self.max_num_seqs - len(first)), in_batch))
            unbatched = [request for request in unbatched if request not in self._in_batch]
        assert first is not None
        self.fair.virtual_time = max(self.fair.virtual_time, virtual_times[first])
        until = [value + QUANTUM for batch, value in virtual_times.items() if batch is not first]
        until += [request.request_group.virtual_time + self._max_lead for request in unbatched]
        return first, min(until, default=math.inf)

    def _start_waves(self) -> None:
        """Requests that decode by a wavefront become batches of their own."""
        for request, speculator in self._speculators.items():
            if request not in self._in_batch and request in self.running and (wave := speculator.start_wave()) is not None:
                self.batches.append(wave)
                self._in_batch.add(request)

    def _start_tokens(self, batch: Batch, requests: Sequence[Request]) -> None:
        """Add the next tokens of requests to a batch, prompts in chunks."""
        prompt_tokens_left = self.prefill_chunk - sum(chunk.part.count for chunk in batch.chunks if chunk.part.count > 1)
        entries, alone = [], len(self.running) == 1
        for request in requests:
            if request.in_prefill and prompt_tokens_left <= 0:
                continue  # in a later batch
            speculator = None if request.in_prefill else self._speculators.get(request)
            if speculator is not None and alone:
                speculator.draft(self._new_arrivals, self.counters)
            cache, new = (request.cache, request.next_tokens(self.prefill_chunk)) if speculator is None else speculator.next_pass(alone)
            prompt_tokens_left -= len(new) if request.in_prefill else 0
            assert cache is not None
            entries.append(Entry(request.prompt_index, cache, new, request))
            self._in_batch.add(request)
        if entries:
            with torch.inference_mode():
                batch.enter(entries)

    @torch.inference_mode()
    def _advance(self, batch: Batch, until_virtual_time: float) -> list[Chunk]:
        """Run stage passes until tokens have reached the end of the network, a request has arrived or failed, the batch was split, or all
        request groups of the batch have passed `until_virtual_time`; with the policy `depth` one pass. Returns the chunks that have reached
        the end."""
        policy, counters = self.policy, self.counters
        budget = SchedulerStepBudget(batch, policy, until_virtual_time, self._new_arrivals)
        done: list[Chunk] = []
        passes_before, rows_before, started = batch.stage_passes, batch.rows_computed, time.perf_counter()
        while batch.chunks and not done:
            done = batch.advance(policy.next_stage(batch), budget)
            if batch.chunks and batch.stage_passes >= policy.split_at_pass(batch):
                self.batches.append(batch.split(batch.earliest_stage))
                break
            if batch.failures or not policy.loop_until_exit or self._new_arrivals or budget.virtual_time_is_up():
                break
        counters.engine_seconds += time.perf_counter() - started
        counters.stage_passes += batch.stage_passes - passes_before
        counters.rows += batch.rows_computed - rows_before
        if not batch.chunks:
            self.batches.remove(batch)
        return done

    def _append_tokens(self, done: Iterable[Chunk]) -> None:
        """Sample the next tokens of the requests whose prefill is done: one, or with speculation one for each row of a verification."""
        ready: list[tuple[Request, Chunk, list[SamplingKey]]] = []
        for chunk in done:
            request = chunk.request
            assert request is not None
            self._in_batch.discard(request)
            speculator = None if request.in_prefill else self._speculators.get(request)
            if request.in_prefill:
                request.n_computed += chunk.part.count
                request.prompt_steps += chunk.steps_of_tokens()
                self.counters.processed_tokens += chunk.part.count
                if request.in_prefill:
                    continue
            part = chunk.part
            keys = [request.sampling_key()] if speculator is None else speculator.sampling_keys(part.cache, part.count)
            ready.append((request, chunk, keys))
        if not ready:
            return
        with torch.inference_mode(), self.counters.timed():
            final = [chunk.final_states[-len(keys) :] for _, chunk, keys in ready]
            states = final[0] if len(ready) == 1 else torch.cat(final)
            logits = self.engine.model.head(states).float()
            sampled = sample(logits, [key for _, _, keys in ready for key in keys])
        last = 0
        for request, chunk, keys in ready:
            first, last = last, last + len(keys)
            speculator = self._speculators.get(request)
            if speculator is not None and speculator.is_draft(chunk.part.cache):
                speculator.add_draft(sampled.tokens[first], chunk.steps_by_group)
            else:
                self._append_row_tokens(request, chunk, sampled, logits, range(first, last))

    def _append_row_tokens(self, request: Request, chunk: Chunk, sampled: Sampled, logits: Tensor, rows: range) -> None:
        """Append the tokens that were sampled from the last rows of a chunk, until one of them is not the token of the next row."""
        n, n_before = chunk.part.count, len(request.tokens)
        tokens, steps = chunk.positions_and_tokens[1].tolist(), chunk.steps_of_tokens()
        for i, row in enumerate(rows, start=n - len(rows)):
            if not sampled.finite[row]:
                self._finish(request, "error", UserError(NOT_FINITE))
                return
            self._append_token(request, sampled.tokens[row], logits[row], steps[i])
            if request.finish_reason or i + 1 == n or sampled.tokens[row] != tokens[i + 1]:
                break
        if n_before > 0 and (speculator := self._speculators.get(request)) is not None:
            speculator.on_verified(len(request.tokens) - n_before, chunk.steps_by_group)
            if speculator.wave is not None:
                self._in_batch.add(request)
        if request.finish_reason:
            self._finish(request, request.finish_reason)

    def _append_token(self, request: Request, token: int, logits: Tensor | None, steps: tuple[int, ...]) -> None:
        """Append a token that was sampled from the newest one's pass; the request may have ended then (`finish_reason`)."""
        if request.tokens:  # the first new token is sampled from the prompt's last, which is counted already
            request.n_computed += 1
            self.counters.processed_tokens += 1
        request.append(token, logits, steps)
        self.counters.tokens += 1
        if not request.finish_reason and request.on_token is not None:
            request.on_token(request)  # it may set `finish_reason`

    def _handle_failures(self, batch: Batch) -> None:
        """End the requests of a batch that have failed. One that failed on guesses goes on without them."""
        failures, batch.failures = batch.failures, []
        for request, error in failures:
            speculator = self._speculators.get(request)
            if speculator is not None and not request.in_prefill and speculator.abandon():
                self._drop_tokens(request)
                del self._speculators[request]
                self._single = None
                continue
            if not self.isolate_errors:
                raise error
            LOG.error("a request has failed", exc_info=error)
            self._finish(request, "error", error)

    # -- finishing -----------------------------------------------------------------------------------------------

    def _finish(self, request: Request, reason: str, error: Exception | None = None) -> None:
        """End a running request."""
        request.ended = time.perf_counter()
        self._drop_tokens(request)
        self._speculators.pop(request, None)
        self._single = None
        cache_bytes = sum(r.cache.nbytes for r in self.running if r.cache is not None)  # caches only grow until a request ends
        self.peak_cache_bytes = max(self.peak_cache_bytes, cache_bytes)
        self.running.remove(request)
        self.fair.end(request, self._bytes(request))
        request.cache = None
        self.counters.finished += 1
        self.counters.speculation_stats += request.speculation_stats
        request.error, request.finish_reason = error, reason
        if request.on_token is not None:
            request.on_token(request)

    def _drop_tokens(self, request: Request) -> None:
        """Remove the tokens of a request from its batch."""
        if request in self._in_batch:
            self._in_batch.discard(request)
            for batch in self.batches:
                batch.drop(request)
            self.batches = [batch for batch in self.batches if batch.chunks]

    def _fail(self, requests: Sequence[Request], error: Exception) -> None:
        """End requests with an error, and drop their batches."""
        self.batches = [batch for batch in self.batches if not any(chunk.request in requests for chunk in batch.chunks)]
        for request in requests:
            self._in_batch.discard(request)
            if request in self.running:
                self._finish(request, "error", error)

    def _drop_cancelled(self) -> None:
        """End the requests that were cancelled."""
        with self._lock:
            cancelled = [request for request in self.waiting if request.cancelled]
            if cancelled:
                self.waiting = deque(request for request in self.waiting if not request.cancelled)
        for request in cancelled:
            request.finish_reason = "cancelled"
            if request.on_token is not None:
                request.on_token(request)
        for request in [request for request in self.running if request.cancelled]:
            self._finish(request, "cancelled")

    def _admit(self) -> None:
        """Start waiting requests as long as the limits allow it."""
        admitted = []
        with self._lock:
            self._new_arrivals.set(False)
            while self.waiting and (
                request := self.fair.next_request(self.waiting, self.running, self.max_num_seqs, self.cache_bytes, self._bytes)
            ):
                self.waiting.remove(request)
                self.fair.begin(request, self._bytes(request))
                self.running.append(request)
                admitted.append(request)
        if admitted:
            self.engine.kernels.hint_capacities([request.capacity for request in self.running])
        for request in admitted:
            try:
                request.cache = self.engine.new_cache(request.capacity, request.loop_params)
                request.cache.allocate()  # now, so that a failure belongs to this request
                if self._can_speculate(request):
                    self._speculators[request] = Speculator(request, self.engine)
            except Exception as error:
                if not self.isolate_errors:
                    raise
                LOG.exception("a request could not begin")
                self._finish(request, "error", error)


def run_until_done(scheduler: Scheduler, requests: Sequence[Request], after_step: Callable[[], object] | None = None) -> None:
    """Add requests and step until all have ended; raises the first error. `after_step` is called after each step."""
    for request in requests:
        scheduler.add(request)
    while scheduler.step():
        if after_step is not None:
            after_step()
    for request in requests:
        if request.error is not None:
            raise request.error
