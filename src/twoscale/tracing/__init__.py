"""A model is traced: every state of every loop."""

from twoscale.tracing.trace import Trace, trace

__all__ = ["Trace", "trace"]
