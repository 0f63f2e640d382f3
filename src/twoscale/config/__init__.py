"""Configs: frozen dataclasses, their JSON, and the presets."""

from twoscale.config.errors import UserError, missing_package
from twoscale.config.model import ModelConfig
from twoscale.config.run import DataConfig, RunConfig, TrainConfig

__all__ = ["DataConfig", "ModelConfig", "RunConfig", "TrainConfig", "UserError", "missing_package"]
