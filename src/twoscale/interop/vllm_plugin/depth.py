"""How deep vLLM runs a folder's loops: fixed loops of each group, or exit rules that read states."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from twoscale import exits
from twoscale.config import ModelConfig, UserError
from twoscale.config.run_folder import MODEL, RunFolder
from twoscale.engine.request import LoopParams
from twoscale.tradeoff.load_run import calibrated_exit, calibration_for, name_checkpoint
from twoscale.tradeoff.summary import read_calibration

READ_STATES = (exits.StepNorm, exits.Acceleration, exits.Cosine, exits.Gate, exits.Fixed, exits.Learned)
"""Rules that need nothing but states. The others read the head after every step, or need to know the row of a batch."""


def check_depth(config: ModelConfig, folder: Path | None, *, loops: Any = None, exit: Any = None, seed: Any = None) -> LoopParams:
    """The loop parameters that `--hf-overrides` asks for; UserError if the folder cannot be run with them.

    `loops` is one number or one for each group. Without it: the depth that the calibration found for `exit="auto"`; with no rule the
    best fixed depth that the calibration has certified; else the model's own. `exit` is `auto`, a rule for all groups as on the command
    line, or a list with one (or None) for each group. `folder` is None where the model is no folder of this machine.
    """
    rules: Any = exit
    if exit == "auto":
        if folder is None:
            raise UserError("exit=auto reads the calibration of a folder on this machine: give its path")
        rules, calibrated = calibration_for(folder)
        loops = calibrated if loops is None else loops
    elif isinstance(exit, Sequence) and not isinstance(exit, str):
        if len(exit) != config.n_groups:
            raise UserError(f"exit has {len(exit)} rules, the model has {config.n_groups} groups: give one for each, or null")
        rules = {g: rule for g, rule in enumerate(exit) if rule is not None}
    elif exit is not None and not isinstance(exit, str):
        raise UserError(f"exit = {exit!r}: write auto, a rule such as acceleration:0.05, or a list with one for each group")
    if loops is None and exit is None and folder is not None:
        loops = fixed_depth(folder)
    planned = exits.rules_per_group(rules, config.n_groups)
    for g, rule in enumerate(planned):
        if rule is not None and not isinstance(rule, READ_STATES):
            raise UserError(
                f"exit rule {type(rule).__name__} of group {g} does not run in vLLM, only rules that read states: use twoscale serve"
            )
        if isinstance(rule, exits.Gate) and not (config.exit_gate and g == config.n_groups - 1):
            raise UserError(f"exits.Gate: group {g} has no learned gate")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise UserError(f"start_seed = {seed!r}: give an integer")
    return LoopParams(planned, config.loops_for(loops), seed=seed or 0)


def fixed_depth(folder: Path) -> int | None:
    """The best fixed depth that the folder's calibration has certified; None where there is none, or it is of other weights."""
    run = RunFolder.of(folder)
    if not (folder / MODEL).exists() or calibrated_exit(run.path, name_checkpoint(folder), must=False) is None:
        return None
    found = (read_calibration(run.calibration) or {}).get("report")
    record = found.get("fixed") if isinstance(found, dict) else None
    word = record.get("rule") if isinstance(record, dict) else None
    rule = exits.parse(word) if isinstance(word, str) else None
    return rule.k if isinstance(rule, exits.Fixed) else None
