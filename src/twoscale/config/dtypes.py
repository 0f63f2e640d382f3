"""The dtypes in which a model's weight matrices may be stored, and the device that computes with them.

fp32  32-bit floating point
bf16  16-bit floating point, as most published checkpoints are
int8  integers from -127 to 127 with a scale for each output and 256 inputs
w8a8  int8, and the inputs of every matrix product are rounded to int8 too, with a scale for each row and 256 inputs
auto  as the folder has them: bf16, int8, or else fp32

Keys and values are in fp32 or bf16, whatever the weights are in; auto is the dtype in which the model computes: fp32, or bf16 on a GPU with
weights in bf16.
"""

from typing import Literal

from twoscale.config.errors import UserError

WeightDtype = Literal["fp32", "bf16", "int8", "w8a8"]
DtypeChoice = Literal["auto", "fp32", "bf16", "int8", "w8a8"]

KVDtype = Literal["auto", "fp32", "bf16"]

KV_DTYPES: tuple[KVDtype, ...] = ("auto", "fp32", "bf16")
WEIGHT_DTYPES: tuple[WeightDtype, ...] = ("fp32", "bf16", "int8", "w8a8")
STORED_DTYPES = ("fp32", "bf16", "int8")  # of files; w8a8 computes with the weights of int8


def check_dtype(dtype: str) -> None:
    if dtype not in ("auto", *WEIGHT_DTYPES):
        raise UserError(f"dtype = {dtype!r}: choose one of auto, {', '.join(WEIGHT_DTYPES)}")


def check_kv_dtype(kv_dtype: str) -> None:
    if kv_dtype not in KV_DTYPES:
        raise UserError(f"kv_dtype = {kv_dtype!r}: keys and values are in {', '.join(KV_DTYPES)}")
