"""What the explorer computes on a task: every answer of a sample, with its steps and what the loop would have answered after each of them.

The steps and the answers are the engine's. The read-out after step k is the engine's answer with at most k steps in the last group: a token
at step k attends to every other one at that step, or at the step at which it left, so its state is the one it has in the full pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from twoscale import exits
from twoscale.engine.forward import forward
from twoscale.explore.session import MAX_LOOPS, Inspection, Session
from twoscale.tasks.task import HELD_OUT, Task


@dataclass(frozen=True)
class Problem:
    """One sequence of a task."""

    ids: tuple[int, ...]
    targets: tuple[int, ...]
    """For each position the token that is asked for; -1 where nothing is."""
    depth: tuple[int, ...]
    """True depth of each answer, 0 where nothing is asked."""

    @property
    def places(self) -> list[int]:
        """Positions at which an answer is predicted."""
        return [t for t, target in enumerate(self.targets) if target >= 0]


@dataclass(frozen=True)
class ReadOut:
    """The likeliest token after one loop step."""

    id: int
    share: float


@dataclass(frozen=True)
class Answer:
    """One answer and the steps behind it."""

    place: int
    """Position at which it is predicted."""
    target: int
    depth: int
    taken: tuple[int, ...]
    """Steps in each group."""
    read_outs: tuple[ReadOut, ...]
    """After step 1, 2, ... of the last group; the last one is the answer."""

    @property
    def steps(self) -> int:
        """Steps in the last group, which is read."""
        return self.taken[-1]

    @property
    def id(self) -> int:
        return self.read_outs[-1].id

    @property
    def right(self) -> bool:
        return self.id == self.target


@dataclass(frozen=True)
class Solved:
    """A problem and the model's answers to it."""

    problem: Problem
    answers: tuple[Answer, ...]
    steps: tuple[tuple[int, ...], ...]
    """For each position the steps in each group."""
    loops: tuple[int, ...]
    """The most steps of each group."""

    @property
    def mean_steps(self) -> float:
        """Over the answers, in the last group."""
        return sum(a.steps for a in self.answers) / len(self.answers)

    @property
    def mean_depth(self) -> float:
        return sum(a.depth for a in self.answers) / len(self.answers)

    @property
    def right(self) -> int:
        return sum(a.right for a in self.answers)


def draw(task: Task, sample: int, seed: int) -> Problem:
    """A held-out sample: the model was not trained on it."""
    batch = task.batch([HELD_OUT + sample], seed)
    ids, targets, depth = (tuple(x[0].tolist()) for x in (batch.ids, batch.targets, batch.depth))
    return Problem(ids, targets, depth)


def changed(problem: Problem, ids: dict[int, int], place: int, target: int, depth: int) -> Problem:
    """The problem with other tokens, and another answer at one position."""

    def put(values: tuple[int, ...], new: dict[int, int]) -> tuple[int, ...]:
        return tuple(new.get(i, value) for i, value in enumerate(values))

    return replace(
        problem, ids=put(problem.ids, ids), targets=put(problem.targets, {place: target}), depth=put(problem.depth, {place: depth})
    )


def solve(session: Session, problem: Problem, exit: exits.Exit, loops: int) -> Solved:
    """The model's answers under an exit rule, with at most so many steps in each group."""
    return session.compute(_solve, session, problem, exit, session.model.config.loops_for(min(loops, MAX_LOOPS)))


@torch.inference_mode()
def _solve(session: Session, problem: Problem, exit: exits.Exit, loops: tuple[int, ...]) -> Solved:
    def run(counts: Sequence[int]) -> tuple[list[ReadOut], Tensor]:
        out = forward(session.model, [list(problem.ids)], exit=exit, loops=counts)
        best = torch.softmax(out.logits[0, places], dim=-1).max(dim=-1)
        return [ReadOut(*pair) for pair in zip(best.indices.tolist(), best.values.tolist(), strict=True)], out.steps[0]

    places = problem.places
    final, steps = run(loops)
    taken = [tuple(row) for row in steps.tolist()]
    before = [run((*loops[:-1], k))[0] for k in range(1, max(taken[t][-1] for t in places))]
    answers = tuple(
        Answer(t, problem.targets[t], problem.depth[t], taken[t], (*(said[i] for said in before[: taken[t][-1] - 1]), final[i]))
        for i, t in enumerate(places)
    )
    return Solved(problem, answers, tuple(taken), loops)


def inspect(session: Session, solved: Solved, answer: Answer) -> Inspection:
    """The geometry of the pass behind one answer, with all loop steps, whether they were taken or not."""
    before = list(solved.problem.ids[: answer.place + 1])
    words = [session.tokenizer.decode([t]) for t in before[-3:]]
    return session.examine(before, answer.id, session.tokenizer.decode([answer.id]), " ".join(words), answer.taken, max(solved.loops))
