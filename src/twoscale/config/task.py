"""Settings of the tasks whose true depth is known. What they generate is in `twoscale.tasks`; nothing here needs torch."""

from dataclasses import dataclass
from typing import Literal

from twoscale.config.errors import UserError

TaskName = Literal["none", "hops", "carry"]
MAX_NODES = 256
MAX_QUERIES = 1024
MAX_DIGITS = 1024


@dataclass(frozen=True)
class HopsConfig:
    """Follow a random permutation f: its N edges in random order, then Q queries `<p> x f^p(x)`."""

    nodes: int = 16
    """N: nodes of the permutation, which is drawn afresh for every sequence."""
    hops: int = 12
    """P: a query asks for p = 1 to P hops."""
    queries: int = 8
    """Q: queries in a sequence."""
    edges: Literal["tokens", "pairs"] = "tokens"
    """`tokens`: one token an edge (a>b); `pairs`: two node tokens an edge, which is much harder to learn."""

    def __post_init__(self) -> None:
        _whole("hops.nodes", self.nodes, 2, MAX_NODES)
        _whole("hops.hops", self.hops, 1, MAX_NODES)
        _whole("hops.queries", self.queries, 1, MAX_QUERIES)
        if self.edges not in ("tokens", "pairs"):
            raise UserError(f"hops.edges = {self.edges!r}: choose one of tokens, pairs")
        if self.hops > self.nodes:
            raise UserError(f"hops.hops = {self.hops} is above hops.nodes = {self.nodes}: ask for fewer hops, or take more nodes")

    @property
    def vocab_size(self) -> int:
        """Nodes, hop counts, edges, end of text."""
        return self.nodes + self.hops + (self.nodes**2 if self.edges == "tokens" else 0) + 1

    @property
    def length(self) -> int:
        """Tokens in a sequence."""
        return self.nodes * (1 if self.edges == "tokens" else 2) + 3 * self.queries

    @property
    def max_depth(self) -> int:
        return self.hops


@dataclass(frozen=True)
class CarryConfig:
    """Add two numbers of D digits; all digits of the sum are predicted at once, at D blank tokens."""

    digits: int = 12
    """D: digits of each number and of the sum, which is taken modulo 10^D."""
    nines: float = 0.5
    """Share of the places whose two digits add up to 9, which pass a carry on; 0.1 is the share among uniform digits."""
    unknown: Literal["no_carry", "either"] = "no_carry"
    """Target of a loop step at which the carry into a digit cannot be known yet (objective `progress`). `no_carry`: the digit without it;
    `either`: the digit with or without it, by a coin, so that the model learns to be unsure until it knows."""

    def __post_init__(self) -> None:
        _whole("carry.digits", self.digits, 1, MAX_DIGITS)
        if not 0 <= self.nines <= 1:
            raise UserError(f"carry.nines = {self.nines}: a share lies between 0 and 1")
        if self.unknown not in ("no_carry", "either"):
            raise UserError(f"carry.unknown = {self.unknown!r}: choose one of no_carry, either")

    @property
    def vocab_size(self) -> int:
        """Digits, blank, end of text."""
        return 12

    @property
    def length(self) -> int:
        """Tokens in a sequence."""
        return 3 * self.digits

    @property
    def max_depth(self) -> int:
        return self.digits


def _whole(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise UserError(f"{name} = {value!r}: must be an integer between {low} and {high}")
