"""Text becomes token shards, shards become batches."""

from twoscale.data.loader import Batches, TokenData, held_out
from twoscale.data.prepare import load_manifest, prepare, source_name
from twoscale.data.tokenizer import Pieces, Tokenizer

__all__ = ["Batches", "Pieces", "TokenData", "Tokenizer", "held_out", "load_manifest", "prepare", "source_name"]
