"""`twoscale sweep`: every rule at every threshold and every baseline on the same held-out tokens, into RUN/sweep.jsonl.

The file is written line by line: a header, a line for each point, a line for each round of timing. A sweep that was killed goes on
behind its last whole line. Points are spread over the processes that torchrun starts; times are taken by the first one alone.
"""

import json
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from twoscale import exits
from twoscale.config import UserError
from twoscale.config.files import atomic_write, cpu_name
from twoscale.config.run_folder import free_name
from twoscale.config.serial import read_jsonl
from twoscale.config.version import VERSION as TWOSCALE_VERSION
from twoscale.exits import Exit
from twoscale.model import LoopedGPT
from twoscale.tradeoff.depth import depth_record
from twoscale.tradeoff.evaluate import Evaluation, describe, evaluate, hard_tokens
from twoscale.tradeoff.heldout import HeldOut
from twoscale.tradeoff.latency import REFERENCE, LatencyTimer, parties, timed_tokens
from twoscale.tradeoff.points import Point, Seen, Table, mixed_depths, same_depths
from twoscale.tradeoff.stats import interval
from twoscale.tradeoff.summary import Sweep, read_sweep
from twoscale.tradeoff.token_kinds import steps_by_kind
from twoscale.train.metrics import ProgressLine
from twoscale.train.world import World

J = TypeVar("J")
R = TypeVar("R")
VERSION = 1
NEGLIGIBLE = 0.002  # nats: a depth is enough when the loss is that near to the full run's


class Sweeper:
    """One sweep of one model on one text."""

    def __init__(
        self,
        model: LoopedGPT,
        text: HeldOut,
        loops: int,
        path: Path,
        about: dict[str, Any],
        world: World,
        rounds: int,
        windows: int,
        spell: Callable[[int], str] = str,
        source: str | None = None,
        quiet: bool = False,
    ) -> None:
        """`about` names the checkpoint; `spell` gives a token's text; `source` tells where the text is from; `quiet`: no progress line."""
        self.spell, self.quiet = spell, quiet
        self.model, self.text, self.loops, self.path, self.world, self.rounds = model, text, loops, path, world, rounds
        self.header = {
            "kind": "sweep", "version": VERSION, **about, "loops": loops, "windows": len(text.ids), "asked_windows": windows,
            "tokens": text.n_asked, "clusters": text.n_clusters, "by": text.by, "text": text.fingerprint,
            "groups": model.config.n_groups,
        }  # fmt: skip
        self.remarks: dict[str, Any] = {
            "mean_loops": model.config.mean_loops,
            "source": source,
        }  # written, but a file without them is the same sweep
        if text.depth is None:
            self.remarks |= {"window_fingerprints": text.window_fingerprints, "timed_tokens": timed_tokens(text.ids.shape[1])[1]}
        self.asked: str | None = None
        """The settings as the command line writes them; each sweep that adds to the file leaves a line with them."""
        self.depths: dict[tuple[int, ...], Evaluation] = {}
        self.table: Table | None = None
        self.records: dict[str, dict[str, Any]] = {}
        self.set_aside: Path | None = None

    # -- the file ------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        """Take up what the file holds of this very sweep; another one is set aside under its checkpoint's name, never lost."""
        lines = read_jsonl(self.path)
        if lines and not all(lines[0].get(key) == self.header[key] for key in self.header):
            aside = free_name(self.path, lines[0].get("checkpoint", "other"))
            os.replace(self.path, aside)
            self.set_aside, lines = aside, []
        elif lines and len(self.path.read_bytes().split(b"\n")) == len(lines) + 1 and self.path.read_bytes().endswith(b"\n"):
            return  # whole: nothing to mend
        if not lines:
            lines = [
                self.header
                | self.remarks
                | {"machine": platform.machine(), "torch": torch.__version__, "threads": torch.get_num_threads(), "cpu": cpu_name()}
                | {"twoscale": TWOSCALE_VERSION, "python": platform.python_version()}
            ]
        with atomic_write(self.path) as f:  # without the line that a kill has cut
            f.write("".join(json.dumps(line) + "\n" for line in lines).encode())

    def _write(self, record: dict[str, Any]) -> None:
        try:
            with open(self.path, "a", encoding="utf-8") as f:
                f.write(json.dumps(record) + "\n")
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror or error}; what was measured before is kept") from None

    # -- the work ------------------------------------------------------------------------------------------------

    def run(self, rounds_of_points: Sequence[Sequence[Point]], say: Callable[[str], None] = lambda text: None) -> Sweep:
        """Measure what the file does not have yet; returns all of it."""
        lines = self._start(say)
        points = [p for points in rounds_of_points for p in points]
        timed = {(line["round"], name) for line in lines if line.get("kind") == "round" for name in line["ms"]}
        untimed = [p for p in points if any((r, p.id) not in timed for r in range(self.rounds))]
        todo = [p for p in points if p.id not in self.records]
        if not todo and not untimed:
            return self._read()
        if self.asked is not None and self.world.main:
            self._write({"kind": "command", "settings": self.asked})
        line = None if self.quiet or not self.world.main else ProgressLine(0, len(todo) + self.rounds * bool(untimed), "sweep")
        seen = Seen(self.records, self._table)
        self.full = self._depth(self.loops)
        done = 0
        self.world.barrier()
        for round_of_points in rounds_of_points:
            if any(p.family.startswith("oracle") for p in [*(p for p in round_of_points if p.id not in self.records), *untimed]):
                self._table()  # every process takes part in it
            done = self._points(round_of_points, seen, line, done)
        if self.world.main and untimed:
            self._time({p.id: p.exit(seen) for p in untimed}, timed, line, done)
        if line is not None:
            line.close()
        self.world.barrier()
        return self._read()

    def _start(self, say: Callable[[str], None]) -> list[dict[str, Any]]:
        """Open the file and take up what it has; its lines."""
        error = None
        if self.world.main:
            try:
                self._open()
            except (UserError, OSError) as problem:
                error = str(problem)
        self.world.agree(error)
        if self.set_aside is not None:
            say(f"{self.path.name} was of another checkpoint or other settings: it is kept as {self.set_aside.name}")
        lines = read_jsonl(self.path)
        self.records = {line["id"]: line for line in lines if line.get("kind") == "point"}
        return lines

    def _points(self, points: Sequence[Point], seen: Seen, line: ProgressLine | None, done: int) -> int:
        """Measure the points that the file does not have; how many are done then."""
        mine = [p for p in points if p.id not in self.records]
        for point, record in self._spread(mine, lambda p: self._measure(p, p.exit(seen))):
            self.records[point.id] = record
            done += 1
            if self.world.main:
                self._write(record)
            if line is not None:
                line.update(done, point.label or point.id)
        return done

    def _read(self) -> Sweep:
        found = read_sweep(self.path)
        assert found is not None
        return found

    def _spread(self, jobs: Sequence[J], work: Callable[[J], R]) -> Iterator[tuple[J, R]]:
        """Every job with its result, in order and in every process; each process does its share."""
        size, rank = self.world.size, self.world.rank
        for first in range(0, len(jobs), size):
            wave = jobs[first : first + size]
            result = work(wave[rank]) if rank < len(wave) else None
            results: list[Any] = [result]
            if size > 1:
                results = [None] * size
                dist.all_gather_object(results, result)
            yield from zip(wave, results, strict=False)

    def _depth(self, k: int) -> Evaluation:
        """The model's answers with k steps in every group, kept: points of fixed depth and the oracles' table share them."""
        depths = (k,) * self.model.config.n_groups
        if depths not in self.depths:
            self.depths[depths] = evaluate(self.model, self.text, None, depths)
        return self.depths[depths]

    def _table(self) -> Table:
        """Losses of every token at many depths. Every process takes part in making it."""
        if self.table is None:
            n = self.model.config.n_groups
            same = [(k,) * n for k in same_depths(self.loops)]
            self._answer(same)
            means = [float(self.depths[d].losses.mean()) for d in same]
            enough = next(d[0] for d, ce in zip(same, means, strict=True) if abs(ce - means[-1]) <= NEGLIGIBLE)
            mixed = mixed_depths(n, enough)
            self._answer(mixed)
            self.table = Table(torch.tensor(same + mixed), len(same), torch.stack([self.depths[d].losses for d in same + mixed]))
        return self.table

    def _answer(self, wanted: Sequence[tuple[int, ...]]) -> None:
        missing = [depths for depths in wanted if depths not in self.depths]
        for depths, found in self._spread(missing, lambda depths: evaluate(self.model, self.text, None, depths)):
            self.depths[depths] = found

    def _measure(self, point: Point, exit: Exit | None) -> dict[str, Any]:
        c = self.model.config
        if point.family in ("full", "fixed"):
            assert point.setting is not None
            found = self._depth(int(point.setting))
        else:
            found = evaluate(self.model, self.text, exit, self.loops)
        record: dict[str, Any] = {"kind": "point", "id": point.id, "family": point.family, "setting": point.setting, "label": point.label}
        record |= describe(c, self.text, found, self.full, exit)
        if self.text.depth is not None:
            return record | depth_record(self.text, found, self.full)
        if c.mean_loops <= self.loops:
            record |= self._against_default(found)
        if isinstance(exit, exits.Oracle):
            depths = exit.depths if exit.depths.dim() == 3 else exit.depths[..., None].expand(*exit.depths.shape, c.n_groups)
            record["ce_table"] = float(self._table().at(depths).mean())
        elif exit is not None and not point.family.startswith(("fixed", "random")):
            kinds = steps_by_kind(self.text, found, self.spell)
            record["hard"] = hard_tokens(self.text, found, self.full, self.spell) | {"kinds": kinds}
        return record

    def _against_default(self, found: Evaluation) -> dict[str, float]:
        """CE minus that of the default depth, with a paired interval, as `dce` is against the full run."""
        rise, clusters = (found.losses - self._depth(self.model.config.mean_loops).losses).numpy(), self.text.clusters.numpy()
        low, high = interval(rise, clusters)
        return {"default_dce": float(rise.mean()), "default_dce_low": low, "default_dce_high": high}

    def _time(self, wanted: dict[str, Exit | None], timed: set[tuple[int, str]], line: ProgressLine | None, done: int) -> None:
        """Rounds of timing, a line for each party of a round; every point is warmed up once before."""
        timer = LatencyTimer(self.model, {REFERENCE: None, **wanted}, self.loops, self.text)
        for party in parties(list(wanted)):
            timer.round(self.rounds, party)
        for r in range(self.rounds):
            for party in parties([name for name in wanted if (r, name) not in timed]):
                self._write({"kind": "round", "round": r, "ms": timer.round(r, party)})
            if line is not None:
                line.update(done + r + 1, f"timing, round {r + 1} of {self.rounds}")
