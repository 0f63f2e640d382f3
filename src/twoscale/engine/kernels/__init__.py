"""Kernels: one interface (`base.Kernels`), three implementations (`native`, `packed`, `torch_ops`), and the inference copy of a model."""

from twoscale.engine.kernels.base import Kernels, RowKernels
from twoscale.engine.kernels.inference_copy import InferenceCopy, KernelName, choose_kernels, optimize_for_inference
from twoscale.engine.kernels.torch_ops import TorchKernels

__all__ = ["InferenceCopy", "KernelName", "Kernels", "RowKernels", "TorchKernels", "choose_kernels", "optimize_for_inference"]
