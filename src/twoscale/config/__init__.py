"""Configs: frozen dataclasses, their JSON, and the presets."""

from twoscale.config.errors import UserError, missing_package
from twoscale.config.model import ModelConfig
from twoscale.config.objective import ObjectiveConfig
from twoscale.config.run import DataConfig, RunConfig, TrainConfig
from twoscale.config.task import CarryConfig, HopsConfig

__all__ = [
    "CarryConfig",
    "DataConfig",
    "HopsConfig",
    "ModelConfig",
    "ObjectiveConfig",
    "RunConfig",
    "TrainConfig",
    "UserError",
    "missing_package",
]
