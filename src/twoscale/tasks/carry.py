"""carry: all digits of a sum at once.

    a_0 a_1 ... a_(D-1)  b_0 b_1 ... b_(D-1)  _ _ ... _

Two numbers of D digits, the least significant digit first, then D blanks. Blank i is asked for digit i of the sum; no blank sees an answer.
Digits are written from the low end because attention is causal: the carry into a digit comes from an earlier position.

The true depth of a digit is the length of the carry chain that ends there, plus one: 1 without a carry, and j + 1 if the carry was made
j places below and passed on by j - 1 places whose digits add up to 9. It is the number of rounds after which the digit is right when every
place computes its digit and its carry from its neighbour's last carry, starting from no carries.

Before the carry into a digit can be known (places below it add up to 9 as far as k - 1 neighbours tell), the target of step k is the digit
without it, or with `unknown="either"` one of the two at random. A model that was trained on the latter is unsure exactly while it waits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from twoscale.config.task import CarryConfig
from twoscale.tasks.task import Batch, Task, draw_below

BLANK = 10


@dataclass(frozen=True)
class Carry(CarryConfig, Task):
    """Token ids: digits 0 to 9, blank 10, end of text 11."""

    name: ClassVar[str] = "carry"
    key: ClassVar[int] = 2

    def words(self) -> list[str]:
        return [*map(str, range(10)), "_"]

    def batch(self, samples: Sequence[int], seed: int = 0) -> Batch:
        D = self.digits
        uniform = self._uniforms(samples, seed, 4, D)
        a = draw_below(uniform[:, 1], 10)  # (B, D)
        other = draw_below(uniform[:, 2], 9)
        other = other + (other >= 9 - a)  # uniform among the nine digits that do not make 9
        b = torch.where(uniform[:, 0] < self.nines, 9 - a, other)
        total, chain = a + b, torch.zeros_like(a)  # chain: length of the carry chain that ends at a place, 0 without a carry
        for i in range(1, D):
            passed = (total[:, i - 1] == 9) & (chain[:, i - 1] > 0)
            chain[:, i] = torch.where(total[:, i - 1] > 9, 1, torch.where(passed, chain[:, i - 1] + 1, 0))
        k = torch.arange(1, D + 1)
        arrived = (chain > 0).unsqueeze(-1) & (chain.unsqueeze(-1) < k)  # (B, D, M): the carry is there after step k
        if self.unknown == "either":
            coin = (uniform[:, 3] < 0.5).unsqueeze(-1)
            arrived = torch.where(known_at(total).unsqueeze(-1) > k, coin, arrived)
        progress = (total.unsqueeze(-1) + arrived) % 10
        blanks = torch.full_like(a, BLANK)
        asked = torch.full((len(a), 2 * D, D), -1)
        steps = torch.cat((asked, progress), dim=1)
        depth = torch.cat((torch.zeros(len(a), 2 * D, dtype=torch.int64), chain + 1), dim=1)
        return Batch(torch.cat((a, b, blanks), dim=1), steps[..., -1].contiguous(), depth, steps)


def known_at(total: torch.Tensor) -> torch.Tensor:
    """(B, D): the first step at which the carry into a place can be known, if step k tells the sums of the k - 1 places below it."""
    known, nines = torch.ones_like(total), torch.zeros_like(total[:, 0])  # nines: places in a row directly below that add up to 9
    for i in range(1, total.shape[1]):
        nines = torch.where(total[:, i - 1] == 9, nines + 1, 0)
        known[:, i] = (nines + 2).clamp(max=i + 1)  # the lowest place has no carry
    return known
