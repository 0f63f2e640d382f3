"""The step budget of a batch: how many loop steps it may take before the scheduler chooses a batch again. It is known in advance, so that a
kernel may take several steps in one call."""

import math
from collections.abc import Sequence

from twoscale.engine.batch import Batch
from twoscale.engine.kernels.base import Interrupt
from twoscale.engine.policy import Policy
from twoscale.engine.rows import Rows


class SchedulerStepBudget:
    """The budget of one batch until the scheduler chooses a batch again. The virtual time of a request group grows by the layers applied to
    its rows. Implements `batch.StepBudget`."""

    def __init__(self, batch: Batch, policy: Policy, until_virtual_time: float, interrupt: Interrupt) -> None:
        self.batch, self.policy, self.until_virtual_time, self.interrupt = batch, policy, until_virtual_time, interrupt
        self.request_groups = set(batch.request_groups())
        self.only_request_group = next(iter(self.request_groups)) if len(self.request_groups) == 1 else None
        """The request group of all rows; None if they belong to several."""

    def virtual_time_is_up(self) -> bool:
        """Whether all request groups have passed `until_virtual_time`."""
        return self.until_virtual_time < math.inf and min(g.virtual_time for g in self.request_groups) > self.until_virtual_time

    def steps_allowed(self, rows: Rows, layers: int) -> float:
        """Steps until the batch is split or all request groups have passed `until_virtual_time`."""
        if not self.policy.loop_until_exit:
            return 1
        steps = self.policy.split_at_pass(self.batch) - self.batch.stage_passes
        if self.until_virtual_time < math.inf:
            steps = min(steps, self._steps_until_virtual_time(rows, layers))
        return max(1.0, steps)

    def _steps_until_virtual_time(self, rows: Rows, layers: int) -> float:
        charges = dict.fromkeys(self.request_groups, 0)
        for part in rows.parts:
            charges[part.chunk.request.request_group] += part.count * layers
        left = [(self.until_virtual_time - g.virtual_time, charge) for g, charge in charges.items()]
        return max((time // charge + 1 if charge else math.inf for time, charge in left if time >= 0), default=1.0)

    def steps_after_exit(self) -> float:
        return self.policy.steps_after_exit

    def charge(self, rows: Rows, layers: int, steps: Sequence[int]) -> None:
        for part, n in zip(rows.parts, steps, strict=True):
            group = self.only_request_group or part.chunk.request.request_group
            group.virtual_time += part.count * layers * n
