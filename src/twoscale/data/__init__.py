"""Text becomes token shards, shards become batches."""

import importlib
from typing import TYPE_CHECKING, Any

from twoscale.data.prepare import load_manifest, prepare, source_name
from twoscale.data.tokenizer import IncrementalDecoder, Tokenizer

if TYPE_CHECKING:
    from twoscale.data.loader import Batches, TokenData, held_out

__all__ = ["Batches", "IncrementalDecoder", "TokenData", "Tokenizer", "held_out", "load_manifest", "prepare", "source_name"]


def __getattr__(name: str) -> Any:
    """Imported when first used: batches need torch, and the workers of `prepare` do not."""
    if name not in ("Batches", "TokenData", "held_out"):
        raise AttributeError(f"module 'twoscale.data' has no attribute {name!r}")
    return getattr(importlib.import_module("twoscale.data.loader"), name)
