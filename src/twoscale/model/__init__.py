"""The looped GPT: blocks, loop groups, start states, loop counts, init."""

from twoscale.model.gpt import LoopedGPT, allocate, init_weights
from twoscale.model.group import LoopGroup, Recorder
from twoscale.model.start import StateNoise, draw_loops

__all__ = ["LoopGroup", "LoopedGPT", "Recorder", "StateNoise", "allocate", "draw_loops", "init_weights"]
