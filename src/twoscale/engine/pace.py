"""How far a batch goes before the scheduler chooses again. Steps are limited in advance, so that a kernel may take several in one call."""

import math

from twoscale.engine.batch import Batch
from twoscale.engine.kernels.base import Interrupt
from twoscale.engine.policy import Policy
from twoscale.engine.rows import Rows


class SchedulerPace:
    """How far a batch may go before another one is chosen; its clients are charged for its calls. Implements `batch.Pace`."""

    def __init__(self, batch: Batch, policy: Policy, until_virtual_time: float, interrupt: Interrupt) -> None:
        self.batch, self.policy, self.until_virtual_time, self.interrupt = batch, policy, until_virtual_time, interrupt
        self.clients = set(batch.clients())
        self.one = next(iter(self.clients)) if len(self.clients) == 1 else None
        """The client if all rows have the same."""

    def time_is_up(self) -> bool:
        """Whether all clients have passed `until_virtual_time`."""
        return self.until_virtual_time < math.inf and min(client.virtual_time for client in self.clients) > self.until_virtual_time

    def max_steps(self, rows: Rows, layers: int) -> float:
        """Steps until the batch is split or all clients have passed `until_virtual_time`."""
        if not self.policy.loop_until_exit:
            return 1
        steps = self.policy.split_after_calls(self.batch) - self.batch.calls
        if self.until_virtual_time < math.inf:
            steps = min(steps, self._steps_until_time_is_up(rows, layers))
        return max(1.0, steps)

    def _steps_until_time_is_up(self, rows: Rows, layers: int) -> float:
        charges = dict.fromkeys(self.clients, 0)
        for part in rows.parts:
            charges[part.in_flight.request.client] += part.count * layers
        left = [(self.until_virtual_time - client.virtual_time, charge) for client, charge in charges.items()]
        return max((time // charge + 1 if charge else math.inf for time, charge in left if time >= 0), default=1.0)

    def charge(self, rows: Rows, layers: int) -> None:
        if self.one is not None:
            self.one.virtual_time += rows.n * layers
            return
        for part in rows.parts:
            part.in_flight.request.client.virtual_time += part.count * layers
