"""The engine: rows that leave loops one by one, the cache, whole passes, decoding, and what is measured on them."""

from twoscale.engine.decode import Generation, Text, generate, stream
from twoscale.engine.loop import Engine, Loop
from twoscale.engine.passes import Forward, forward

__all__ = ["Engine", "Forward", "Generation", "Loop", "Text", "forward", "generate", "stream"]
