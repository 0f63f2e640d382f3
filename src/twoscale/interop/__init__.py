"""Models from folders, ours and others'."""

from twoscale.interop.load import load

__all__ = ["load"]
