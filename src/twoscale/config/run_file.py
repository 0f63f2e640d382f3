"""config.json of a run or a checkpoint: the full RunConfig, marked as this program's."""

from pathlib import Path

from twoscale.config.errors import UserError
from twoscale.config.files import write_json
from twoscale.config.run import RunConfig
from twoscale.config.run_folder import CONFIG as CONFIG
from twoscale.config.serial import from_dict, read_json, to_dict

MODEL_TYPE = "twoscale"


def save_config(folder: Path, config: RunConfig) -> None:
    write_json(folder / CONFIG, {"model_type": MODEL_TYPE, **to_dict(config)})


def load_config(folder: Path) -> RunConfig:
    values = read_json(folder / CONFIG)
    if not isinstance(values, dict) or values.pop("model_type", None) != MODEL_TYPE:
        raise UserError(f"{folder / CONFIG} is not a config of this program (its model_type is not {MODEL_TYPE})")
    return from_dict(RunConfig, values, str(folder / CONFIG))
