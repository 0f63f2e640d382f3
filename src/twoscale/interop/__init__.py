"""Models from folders, ours and others'."""

from twoscale.interop.load import find, load

__all__ = ["find", "load"]
