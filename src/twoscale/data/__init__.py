"""Text becomes token shards, shards become batches."""

from twoscale.data.loader import Batches, TokenData, held_out
from twoscale.data.prepare import load_manifest, prepare
from twoscale.data.tokenizer import Tokenizer

__all__ = ["Batches", "TokenData", "Tokenizer", "held_out", "load_manifest", "prepare"]
