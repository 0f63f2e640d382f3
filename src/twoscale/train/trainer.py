"""The training loop: single process, DDP and FSDP2 are the same code.

All that is random in a step is keyed by (seed, step): the samples, the loop counts, the start states. So a run that
was killed goes on bit for bit where its last checkpoint left it, and the number of processes changes only rounding.
"""

import contextlib
import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

import torch
from torch import Tensor, nn

from twoscale.config import RunConfig, UserError
from twoscale.config.files import fingerprint
from twoscale.config.run_folder import RunFolder
from twoscale.config.words import plural
from twoscale.model import LoopedGPT, StateNoise, draw_loops
from twoscale.train import checkpoint as ckpt
from twoscale.train.metrics import Metrics, ProgressLine
from twoscale.train.objective import build_objective, read_answers
from twoscale.train.optim import build_optimizers, set_rates
from twoscale.train.parallel import (
    build_model,
    compile_blocks,
    distribute,
    fill_shards,
    gradient_sync,
    reshard,
    reuse_memory,
    uncompiled,
)
from twoscale.train.settings import check_checkpoint
from twoscale.train.source import open_source
from twoscale.train.state import load_state, save_state
from twoscale.train.world import World


class Diverged(RuntimeError):
    """The loss or the gradient is no longer a number."""


@dataclass(frozen=True)
class TrainResult:
    """How a run ended."""

    step: int
    finished: bool
    """False when a signal stopped it."""
    val_loss: float | None
    checkpoint: Path | None
    signal: int | None = None
    val_text: str = ""
    """Which held-out text or samples `val_loss` is of, and at how many loops."""


class Interrupts:
    """Ctrl-C and SIGTERM ask the loop to save and leave; a second one is taken at its word."""

    def __init__(self) -> None:
        self.received: int | None = None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            raise KeyboardInterrupt
        self.received = number

    @contextlib.contextmanager
    def installed(self) -> Iterator["Interrupts"]:
        before = {}
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                before[number] = signal.signal(number, self._handle)
        except ValueError:
            pass  # not the main thread: signals are somebody else's business
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


Probe = Callable[["Trainer"], None]
"""Looks at the model at set steps (train.geometry_interval). Called in every process; must change nothing."""


class Trainer:
    """One run in one folder. `train()` goes from its newest checkpoint (or the start) to the end."""

    def __init__(
        self,
        config: RunConfig,
        run: Path,
        data: Path | None,
        world: World,
        checkpoint: str | None = None,
        probes: Sequence[Probe] = (),
        init: LoopedGPT | None = None,
    ) -> None:
        self.config, self.run, self.world, self.probes = config, run, world, probes
        self.metrics: Metrics | None = None
        self.checkpoints = RunFolder(run).checkpoints
        c = config.train
        reuse_memory(world.device)
        with world.together():
            self.micro = _micro_batch(config, world)
            self.objective = build_objective(config)
            self.source = open_source(config, data, (world.local_rank, world.local_size))
            self.held_out = self.source.heldout(c.eval_sequences)
            self.progress, source = self._find_progress(checkpoint)
        world.same("the data of the nodes differ", self.source.identity, "give every node the same shards (--data-dir)")
        seen = {} if source is None else {"the checkpoint to go on from": source.name, "its state": fingerprint(source / ckpt.STATE)}
        world.same("the nodes do not see the same run", seen, "put the run on a file system that all of them share")
        self.model = build_model(config, world)
        if c.objective.gate_only:
            for name, p in self.model.named_parameters():
                p.requires_grad_(".gate." in name)
        with world.together():
            self.compiled = self.progress.step < c.steps and compile_blocks(self.model, c, world, self.micro)
        self.wrapped = distribute(self.model, c, world)
        fill_shards(self.model, config, world)
        self.optimizers = build_optimizers(self.model, c)
        self.from_init = init is not None and source is None
        if source is not None:
            load_state(source, self.model, self.optimizers, world)
        elif init is not None:
            with world.together():
                ckpt.load_weights(self.model, ckpt.model_tensors(init), Path("--init"), gate=False)
        self.last_saved = source
        if checkpoint is not None and world.main:
            ckpt.set_aside_after(self.checkpoints, self.progress.step)
        world.barrier()

    def _find_progress(self, name: str | None) -> tuple[ckpt.Progress, Path | None]:
        """The checkpoint to go on from and how far it is; the start and None for a new run."""
        source = self._find_checkpoint(name)
        if source is None:
            return ckpt.Progress(step=0, tokens=0, sample=0, seed=self.config.train.seed), None
        check_checkpoint(ckpt.load_config(source), self.config, source)
        return ckpt.read_progress(source), source

    def _find_checkpoint(self, name: str | None) -> Path | None:
        rank, size = self.world.rank, self.world.size
        if name is None:
            return ckpt.newest_checkpoint(self.checkpoints, rank, size)
        folder = self.checkpoints / Path(name).name
        if not folder.is_dir():
            known = ", ".join(p.name for p in ckpt.list_checkpoints(self.checkpoints)) or "none"
            raise UserError(f"{folder} does not exist (checkpoints of this run: {known})")
        if (problem := ckpt.fault(folder, rank, size)) is not None:
            raise UserError(f"the checkpoint {folder} is damaged ({problem})")
        return folder

    # -- the loop ------------------------------------------------------------------------------------------------

    def train(self) -> TrainResult:
        """Run to the end, or until a signal comes; either way the state is saved."""
        c, world = self.config.train, self.world
        metrics = self.metrics = Metrics(self.run, self.config, self.progress.step) if world.main else None
        line = ProgressLine(self.progress.step, c.steps, self.config.name) if world.main else None
        stopped = False
        if self.from_init:
            self.save()  # a run that is killed early must not go on from fresh weights
        probed = self._probe() if self.progress.step == 0 else 0.0
        try:
            with Interrupts().installed() as interrupts:
                while self.progress.step < c.steps and not stopped:
                    started = time.perf_counter()
                    record, stopped = self._step(interrupts)
                    record["tokens_per_s"] = round(c.batch_size * self.config.model.block_size / (time.perf_counter() - started), 1)
                    step = self.progress.step
                    if step % c.eval_interval == 0 or step == c.steps:
                        record |= self.evaluate()
                        self.progress = replace(self.progress, val_loss=float(record["val_loss"]))  # type: ignore[arg-type]
                    if c.geometry_interval and (step % c.geometry_interval == 0 or step == c.steps):
                        probed += self._probe()
                    if probed:
                        record["geometry_s"], probed = round(probed, 3), 0.0
                    if metrics is not None and line is not None:
                        metrics.write(record)
                        at = step if step == c.steps else step - step % c.eval_interval
                        line.update(step, progress_summary(record, self.progress.val_loss, at))
                    if step % c.checkpoint_interval == 0 or step in c.milestones or step == c.steps or stopped:
                        self.save()
        finally:
            if metrics is not None and line is not None:
                metrics.close()
                line.close()
        finished = self.progress.step >= c.steps
        return TrainResult(self.progress.step, finished, self.progress.val_loss, self.last_saved, interrupts.received, self.val_text)

    @property
    def val_text(self) -> str:
        """Which held-out text or samples the validation loss is of, and at how many loops."""
        m, text = self.config.model, self.source.describe(self.held_out[1])
        return f"{text}, at {plural(m.mean_loops, 'loop')}" if m.n_groups else text

    def loops_at(self, step: int) -> tuple[int, ...]:
        """The loops of each group at a step."""
        c, model = self.config.train, self.config.model
        return draw_loops(model, c.seed, step, c.mean_loops(step, model.mean_loops))

    def _step(self, interrupts: Interrupts) -> tuple[dict[str, object], bool]:
        """One optimizer step; returns its record and whether any process was asked to stop."""
        c, world, step = self.config.train, self.world, self.progress.step
        loops = self.loops_at(step)
        scale = set_rates(self.optimizers, c, step)
        for optimizer in self.optimizers.values():
            optimizer.zero_grad(set_to_none=True)
        loss = self._accumulate(step, loops)
        stop = torch.tensor(float(interrupts.received is not None), device=loss.device)
        loss_value, stop_value = world.mean(torch.stack((loss, stop))).tolist()
        norm = self._clip()
        if not (math.isfinite(loss_value) and math.isfinite(norm)):
            raise Diverged(self._divergence(step, loops, loss_value, norm))
        for optimizer in self.optimizers.values():
            optimizer.step()
        samples = c.batch_size * (step + 1)
        self.progress = replace(self.progress, step=step + 1, sample=samples, tokens=samples * self.config.model.block_size)
        record: dict[str, object] = {
            "step": step + 1, "loss": loss_value, "loops": list(loops), "grad_norm": norm,
            "lr_scale": scale, "tokens": self.progress.tokens,
        }  # fmt: skip
        return record, stop_value > 0

    def _accumulate(self, step: int, loops: tuple[int, ...]) -> Tensor:
        """Gradients of this process's share of the global batch; returns its mean loss."""
        c, world = self.config.train, self.world
        share = c.batch_size // world.size
        rows = range(world.rank * share, (world.rank + 1) * share)
        total = torch.zeros((), device=world.device)
        for first in range(0, share, self.micro):
            mine = rows[first : first + self.micro]
            ids, targets = self._to_device(self.source([step * c.batch_size + row for row in mine]))
            with gradient_sync(self.wrapped, now=first + self.micro >= share), self._autocast():
                noise = StateNoise(c.seed, step, tuple(mine))
                loss = self.wrapped(ids, targets, loops=loops, noise=noise, objective=self.objective)
                (loss * (self.micro / share)).backward()
            total += loss.detach() * (self.micro / share)
        return total

    def _clip(self) -> float:
        limit = self.config.train.clip or math.inf
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

    def _divergence(self, step: int, loops: tuple[int, ...], loss: float, norm: float) -> str:
        last = f"the last good checkpoint is {self.last_saved}" if self.last_saved else "no checkpoint was saved yet"
        return (
            f"step {step + 1}: loss {loss}, gradient norm {norm}, loops drawn {list(loops)}: the run has diverged and stopped; {last}. "
            "Lower the rate (train.lr, train.muon_lr) or lengthen train.warmup_steps"
        )

    # -- validation and saving -----------------------------------------------------------------------------------

    @property
    def evaluated(self) -> nn.Module:
        """What a pass without gradients calls: sharded weights are gathered by the wrapper's hooks, DDP's are not needed."""
        return self.wrapped if self.world.size > 1 and self.config.train.sharded else self.model

    def track(self, values: dict[str, float]) -> None:
        """Send a probe's numbers of this step to TensorBoard or W&B, where they are asked for."""
        if self.metrics is not None:
            self.metrics.track(self.progress.step, values)

    def _probe(self) -> float:
        """Run the probes; returns the seconds they took."""
        started = time.perf_counter()
        if self.config.train.geometry_interval:
            with uncompiled(self.model), torch.no_grad():
                for probe in self.probes:
                    probe(self)
            reshard(self.model)
        return time.perf_counter() - started

    @torch.no_grad()
    def evaluate(self) -> dict[str, object]:
        """`val_loss`: mean cross-entropy on held-out sequences at mean_loops steps; on a task also `val_accuracy`."""
        module = self.evaluated
        judge = read_answers if self.config.task != "none" else None
        ids, targets = self.held_out
        per_round = self.micro * self.world.size
        total = torch.zeros(3, dtype=torch.float64)
        for first in range(0, len(ids), per_round):
            place = torch.arange(self.micro) + first + self.world.rank * self.micro
            inside = place < len(ids)
            place = place.clamp(max=len(ids) - 1)  # rows past the end are computed, so that shapes stay, but not counted
            batch, wanted = self._to_device((ids[place], targets[place].masked_fill(~inside[:, None], -1)))
            count = int(inside.sum()) * ids.shape[1]
            with self._autocast():
                found = module(batch, wanted, noise=StateNoise(), objective=judge)
            if count:
                loss, right = found.double().cpu().expand(2) if judge is None else found.double().cpu()
                total += torch.stack((loss * count, right * count, torch.tensor(float(count))))
        reshard(module)
        summed = self.world.mean(total.to(self.world.device))
        result: dict[str, object] = {"val_loss": float(summed[0] / summed[2])}
        return result if judge is None else result | {"val_accuracy": round(float(summed[1] / summed[2]), 6)}

    def save(self) -> None:
        """Write a checkpoint and remove the ones that are no longer kept. A collective call."""
        c, world = self.config.train, self.world
        self.last_saved = save_state(
            self.checkpoints, self.config, self.progress, self.model, self.optimizers, self.source.tokenizer, world
        )
        if world.main:
            ckpt.prune(self.checkpoints, c.keep_last, c.milestones)

    def _to_device(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return batch[0].to(self.world.device, non_blocking=True), batch[1].to(self.world.device, non_blocking=True)

    def _autocast(self) -> torch.autocast:
        precision, kind = self.config.train.precision, self.world.device.type
        enabled = precision == "bf16" or (precision == "auto" and kind == "cuda")
        return torch.autocast(kind, dtype=torch.bfloat16, enabled=enabled)


def _micro_batch(config: RunConfig, world: World) -> int:
    """Sequences in one forward pass of one process."""
    c = config.train
    if c.batch_size % world.size:
        raise UserError(f"train.batch_size = {c.batch_size} does not divide among {world.size} processes: choose a multiple")
    share = c.batch_size // world.size
    micro = min(c.micro_batch_size or share, share)
    if share % micro:
        raise UserError(f"train.micro_batch_size = {micro} does not divide the {share} sequences of a process: choose a divisor")
    return micro


def progress_summary(record: dict[str, object], val_loss: float | None, at: int) -> str:
    """The progress line; the validation loss with the step at which it was measured."""
    loops = "/".join(str(k) for k in record["loops"])  # type: ignore[attr-defined]
    measured = [f"step {at}"]
    if (right := record.get("val_accuracy")) is not None:
        measured.append(f"{100 * right:.1f} % right")  # type: ignore[operator]
    val = f"  val {val_loss:.4f} ({', '.join(measured)})" if val_loss is not None else ""
    return f"loss {record['loss']:.4f}{val}  {record['tokens_per_s']:.0f} tok/s  loops {loops}"
