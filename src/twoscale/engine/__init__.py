"""The engine: requests become tokens. Rows leave loops one by one and share calls; one scheduler drives all decoding."""

from twoscale.engine.engine import Engine
from twoscale.engine.forward import Forward, forward
from twoscale.engine.generate import Generation, generate, stream
from twoscale.engine.loop import Loop
from twoscale.engine.request import LoopParams, Request, SamplingParams, loop_params
from twoscale.engine.scheduler import Scheduler

__all__ = [
    "Engine",
    "Forward",
    "Generation",
    "Loop",
    "LoopParams",
    "Request",
    "SamplingParams",
    "Scheduler",
    "forward",
    "generate",
    "loop_params",
    "stream",
]
