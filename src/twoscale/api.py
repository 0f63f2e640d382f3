"""The commands as functions that return values. Each takes a run: its folder, or `bundled` for the model in the package.

    found = twoscale.evaluate("runs/tiny", exit="acceleration:0.05", loops=30)
    found.bits_per_byte
    twoscale.calibrate("runs/tiny", max_dce=0.005)
    twoscale.sweep("runs/tiny", progress=print).to_pandas()

This module is above all that it calls, so `bundled` becomes a run here, once for all of them.
`twoscale.report` is in report/, which needs no torch.
"""

from twoscale.interop.harness_tasks import evaluate_tasks
from twoscale.interop.runs import on_run
from twoscale.tradeoff import commands

__all__ = ["calibrate", "evaluate", "evaluate_tasks", "sweep"]

sweep = on_run(commands.sweep)
calibrate = on_run(commands.calibrate)
evaluate = on_run(commands.evaluate)
