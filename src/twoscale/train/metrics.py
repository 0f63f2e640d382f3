"""Where the numbers of a run go: metrics.jsonl always, a progress line, TensorBoard or W&B when asked for."""

import contextlib
import errno
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from twoscale.config import RunConfig, UserError, missing_package
from twoscale.config.files import atomic_write
from twoscale.config.progress import listening
from twoscale.config.run_folder import RunFolder
from twoscale.config.serial import read_steps, to_dict

QUIET_SECONDS = 15.0  # between two progress lines where no terminal listens


class Metrics:
    """Appends records to metrics.jsonl. Going on from a checkpoint drops what was written after it."""

    def __init__(self, run: Path, config: RunConfig, from_step: int) -> None:
        self.path = RunFolder(run).metrics
        kept = [r for r in read_steps(self.path) if r["step"] <= from_step]
        with atomic_write(self.path) as f:
            f.write("".join(json.dumps(r) + "\n" for r in kept).encode())
        try:
            self.file = open(self.path, "ab", buffering=0)  # noqa: SIM115 (closed by close(), which must not write: the disk may be full)
        except OSError as error:
            raise self._cannot_write(error) from None
        self.tracker = _tracker(run, config)

    def write(self, record: dict[str, Any]) -> None:
        """One line; UserError where it cannot be written. What a failed one leaves behind is cut off when the run goes on."""
        line = (json.dumps(record) + "\n").encode()
        try:
            if (self.file.write(line) or 0) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise self._cannot_write(error) from None
        self.track(record["step"], _scalars(record))

    def track(self, step: int, values: dict[str, float]) -> None:
        """Numbers for the tracker alone."""
        if self.tracker is None:
            return
        try:
            self.tracker.write(step, values)
        except OSError as error:
            raise self._cannot_write(error) from None

    def _cannot_write(self, error: OSError) -> UserError:
        return UserError(
            f"cannot write {self.path}: {error.strerror or error}; the run goes on from its last checkpoint once there is room"
        )

    def close(self) -> None:
        self.file.close()
        if self.tracker is not None:
            with contextlib.suppress(OSError):
                self.tracker.close()


class _TensorBoard:
    def __init__(self, run: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise missing_package("tracker=tensorboard needs tensorboard", "track") from None
        self.writer = SummaryWriter(str(RunFolder(run).tensorboard))  # type: ignore[no-untyped-call]

    def write(self, step: int, values: dict[str, float]) -> None:
        for key, value in values.items():
            self.writer.add_scalar(key, value, step)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        self.writer.close()  # type: ignore[no-untyped-call]


class _WandB:
    def __init__(self, run: Path, config: RunConfig) -> None:
        try:
            import wandb
        except ImportError:
            raise missing_package("tracker=wandb needs wandb", "track") from None
        self.run = wandb.init(project="twoscale", name=config.name, dir=str(run), config=to_dict(config))

    def write(self, step: int, values: dict[str, float]) -> None:
        self.run.log(values, step=step)

    def close(self) -> None:
        self.run.finish()


def _tracker(run: Path, config: RunConfig) -> _TensorBoard | _WandB | None:
    if config.train.tracker == "none":
        return None
    return _TensorBoard(run) if config.train.tracker == "tensorboard" else _WandB(run, config)


def _scalars(record: dict[str, Any]) -> dict[str, float]:
    """Numbers as they are, lists as one entry for each group."""
    scalars: dict[str, float] = {}
    for key, value in record.items():
        if isinstance(value, list):
            scalars.update({f"{key}/{i}": float(v) for i, v in enumerate(value)})
        elif isinstance(value, int | float) and key != "step":
            scalars[key] = float(value)
    return scalars


class ProgressLine:
    """A bar on a terminal; elsewhere a line every few seconds, or words for a listener."""

    def __init__(self, done: int, total: int, title: str, out: TextIO | None = None) -> None:
        self.out = out or sys.stderr
        self.first, self.total, self.title = done, total, title
        self.started = self.printed = time.monotonic()
        self.listener = listening()
        drawn = self.listener is None and self.out.isatty()
        self.bar = tqdm(total=total, initial=done, desc=title, file=self.out, dynamic_ncols=True) if drawn else None

    def update(self, done: int, text: str) -> None:
        if self.listener is not None:
            self.listener(f"{done}/{self.total}  {text}", done / max(1, self.total))
            return
        if self.bar is not None:
            self.bar.set_postfix_str(text, refresh=False)
            self.bar.update(done - self.bar.n)
            return
        now = time.monotonic()
        if now - self.printed >= QUIET_SECONDS or done == self.total:
            self.printed = now
            left = (now - self.started) / max(1, done - self.first) * (self.total - done)
            print(f"{self.title} {done}/{self.total}  {text}  {clock(left)} left", file=self.out, flush=True)

    def say(self, text: str) -> None:
        """A line of its own, above the bar."""
        if self.bar is not None:
            self.bar.write(text, file=self.out)
        else:
            print(text, file=self.out, flush=True)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


def clock(seconds: float) -> str:
    """1:02:03 or 4:05."""
    whole = int(seconds + 0.5)
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"
