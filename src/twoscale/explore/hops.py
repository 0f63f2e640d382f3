"""The hops task in the explorer: a sample's permutation, its queries, and the walk that the loop's read-outs make."""

from dataclasses import dataclass
from typing import Literal

from twoscale.config import UserError
from twoscale.explore.answers import Answer, Problem, changed
from twoscale.tasks.hops import Hops

Kind = Literal["hop", "stay", "jump", "none"]


@dataclass(frozen=True)
class Move:
    """One loop step as a move between nodes."""

    k: int
    start: int | None
    """The node that was read before this step; the query's own node before the first."""
    end: int | None
    """The node that is read after it; None where the read-out is no node."""
    kind: Kind
    """`hop`: along an edge; `stay`: the same node; `jump`: another node; `none`: no node."""


def permutation(task: Hops, problem: Problem) -> tuple[int, ...]:
    """f, from the edges that the sequence lists."""
    N = task.nodes
    if task.edges == "tokens":
        pairs = [divmod(t - N - task.hops, N) for t in problem.ids[:N]]
    else:
        pairs = list(zip(problem.ids[: 2 * N : 2], problem.ids[1 : 2 * N : 2], strict=True))
    f = dict(pairs)
    return tuple(f[a] for a in range(N))


def query(task: Hops, problem: Problem, place: int) -> tuple[int, int]:
    """Hops p and node x of the query whose answer is predicted at this position."""
    return problem.ids[place - 1] - task.nodes + 1, problem.ids[place]


def true_path(f: tuple[int, ...], p: int, x: int) -> list[int]:
    """x, f(x), ..., f^p(x)."""
    path = [x]
    for _ in range(p):
        path.append(f[path[-1]])
    return path


def edited(task: Hops, problem: Problem, place: int, p: object, x: object) -> Problem:
    """The problem with another query at this position, and its answer behind it."""
    p, x = _whole("hops p", p, 1, task.hops), _whole("node x", x, 0, task.nodes - 1)
    target = true_path(permutation(task, problem), p, x)[-1]
    return changed(problem, {place - 1: task.nodes + p - 1, place: x, place + 1: target}, place, target, p)


def _whole(name: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high or value != int(value):
        raise UserError(f"{name} = {value!r}: give an integer between {low} and {high}")
    return int(value)


def walk(task: Hops, problem: Problem, answer: Answer) -> list[Move]:
    """The read-outs of an answer as moves, one for each step that was taken."""
    f, moves = permutation(task, problem), list[Move]()
    node: int | None = query(task, problem, answer.place)[1]
    for k, said in enumerate(answer.read_outs, start=1):
        end = said.id if said.id < task.nodes else None
        kind: Kind = "none" if end is None else "jump"
        if end is not None and node is not None:
            kind = "hop" if end == f[node] else "stay" if end == node else "jump"
        moves.append(Move(k, node, end, kind))
        node = end
    return moves
