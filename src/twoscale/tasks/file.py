"""task.json: which task a model was trained on, beside its weights; and the task of a run's config."""

import dataclasses
from pathlib import Path

from twoscale.config import RunConfig, UserError
from twoscale.config.files import write_json
from twoscale.config.run_folder import RunFolder
from twoscale.config.serial import from_dict, read_json, to_dict
from twoscale.tasks.carry import Carry
from twoscale.tasks.hops import Hops
from twoscale.tasks.task import Task

VERSION = 1  # rises whenever a sample of the same task, settings, seed and number changes
TASKS: dict[str, type[Hops] | type[Carry]] = {"hops": Hops, "carry": Carry}


def task_of(config: RunConfig) -> Task | None:
    """The task that a run trains on; None for text."""
    if config.task == "none":
        return None
    return TASKS[config.task](**dataclasses.asdict(getattr(config, config.task)))


def save_task(folder: Path, task: Task) -> None:
    write_json(RunFolder(folder).task, {"version": VERSION, "task": task.name, "settings": to_dict(task)})


def load_task(folder: Path) -> Task | None:
    """The task of a folder that holds a model or a run; None where it has none."""
    path = RunFolder(folder).task
    if not path.exists():
        return None
    found = read_json(path)
    if not isinstance(found, dict) or found.get("task") not in TASKS:
        raise UserError(f"{path} names no known task: choose one of {', '.join(TASKS)}")
    if found.get("version") != VERSION:
        raise UserError(
            f"{path} is of version {found.get('version')!r}, this program makes samples of version {VERSION}: train the model anew"
        )
    return from_dict(TASKS[found["task"]], found.get("settings"), str(path))
