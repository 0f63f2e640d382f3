"""Kernels: one interface (`base.Kernels`), three implementations (`native`, `packed`, `torch_ops`), and the decode copy of a model."""

from twoscale.engine.kernels.base import Kernels, RowKernels
from twoscale.engine.kernels.decode_copy import DecodeCopy, KernelName, choose_kernels, optimize_for_decode
from twoscale.engine.kernels.torch_ops import TorchKernels

__all__ = ["DecodeCopy", "KernelName", "Kernels", "RowKernels", "TorchKernels", "choose_kernels", "optimize_for_decode"]
