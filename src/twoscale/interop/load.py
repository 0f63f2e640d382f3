"""`twoscale.load`: a model and its tokenizer from a folder."""

from pathlib import Path

from twoscale.config import UserError
from twoscale.data import Tokenizer
from twoscale.model import LoopedGPT
from twoscale.train import checkpoint as ckpt


def load(path: str | Path) -> tuple[LoopedGPT, Tokenizer]:
    """The model of a run (its newest checkpoint) or of one checkpoint folder, in evaluation mode, and its tokenizer."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder: give a run or a checkpoint")
    if (folder / ckpt.MODEL).exists():
        return ckpt.load_model(folder)
    if (folder / "checkpoints").is_dir():
        newest = ckpt.newest_checkpoint(folder / "checkpoints")
        if newest is None:
            raise UserError(f"{folder} has no checkpoint yet: train it first")
        return ckpt.load_model(newest)
    raise UserError(f"{folder} is neither a run nor a checkpoint: it has no {ckpt.MODEL} and no checkpoints/")
