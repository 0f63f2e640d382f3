"""The engine: one scheduler decodes all requests in shared batches, and every token exits every loop group on its own.

The glossary in docs/architecture.md defines loop group, loop step, exit rule, level, stage, stage pass and chunk.
"""

from twoscale.engine.engine import Engine
from twoscale.engine.forward import Forward, forward
from twoscale.engine.generate import Generation, generate, stream
from twoscale.engine.loop import LoopRows
from twoscale.engine.request import LoopParams, Request, SamplingParams, loop_params
from twoscale.engine.scheduler import Scheduler

__all__ = [
    "Engine",
    "Forward",
    "Generation",
    "LoopParams",
    "LoopRows",
    "Request",
    "SamplingParams",
    "Scheduler",
    "forward",
    "generate",
    "loop_params",
    "stream",
]
