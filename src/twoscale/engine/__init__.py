"""The engine: passes over whole sequences and what is measured on them."""

from twoscale.engine.forward import Forward, forward

__all__ = ["Forward", "forward"]
