"""What sampling costs beside greedy decoding: many rows, a large vocabulary, every kind of setting, in turns."""

from functools import partial

import torch

from twoscale.bench.timing import interleaved
from twoscale.config import ModelConfig
from twoscale.engine import generate
from twoscale.model import LoopedGPT

ROWS, NEW = 64, 6
# A plain model of 15M parameters with a vocabulary of 32,000. Random weights give nearly equal probabilities, the hardest case for top_p;
# with the head scaled up they are as peaked as a trained model's.
SHAPE = ModelConfig(vocab_size=32_000, block_size=256, n_layer=6, n_head=6, n_embd=288, groups=(), mlp_hidden=768, mlp="gated")
SETTINGS: dict[str, dict[str, float | int]] = {
    "greedy": {},
    "temperature 1": {"temperature": 1.0},
    "top_k 50": {"temperature": 1.0, "top_k": 50},
    "top_k 5000": {"temperature": 1.0, "top_k": 5000},
    "top_p 0.9": {"temperature": 1.0, "top_p": 0.9},
    "top_k 50, top_p 0.9": {"temperature": 1.0, "top_k": 50, "top_p": 0.9},
    "top_k 5000, top_p 0.9": {"temperature": 1.0, "top_k": 5000, "top_p": 0.9},
}


def bench_sampling(repeats: int, device: torch.device) -> dict[str, dict[str, float]]:
    """Seconds of NEW tokens for ROWS rows by each setting, for a flat and for a peaked distribution."""
    found = {}
    for name, gain in (("nearly equal probabilities", 1.0), ("as peaked as a trained model", 20.0)):
        model = LoopedGPT(SHAPE).eval().to(device)
        assert model.ln_f is not None
        with torch.no_grad():
            model.ln_f.weight.mul_(gain)
        works = {key: partial(generate, model, [[i + 1] for i in range(ROWS)], NEW, **setting) for key, setting in SETTINGS.items()}  # type: ignore[arg-type]
        found[name] = interleaved(works, repeats)
    return found
