"""`twoscale explore [MODEL]`: a live page, to watch a looped model write or solve its task, and to look into its loops.

twoscale explore
twoscale explore hops
twoscale explore runs/tiny --port 7861
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from twoscale.cli.parse import parse, say
from twoscale.config import UserError, missing_package
from twoscale.config.dtypes import DtypeChoice


@dataclass(frozen=True)
class ExploreArgs:
    """Serve a page with a prompt, streamed text coloured by loop steps, and the geometry behind every token.

    A model that was trained on a task (its folder has a task.json) gets the task's page instead: for hops the permutation as a graph,
    the walk of a query step by step, and the steps of every answer beside its true depth; for carry the sum with the steps of every digit.
    Beside the page of the model there is one of a model in the package: `hops` beside text, `bundled` beside a task.
    """

    model: Annotated[str, tyro.conf.Positional] = "bundled"
    """A run, a checkpoint, an export, a Huginn or Ouro folder, `bundled` (the text model in the package) or `hops` (its task model)."""
    host: str = "127.0.0.1"
    """Address to listen on; by default this machine alone can reach the page."""
    port: int = 7860
    """Port; 0 takes a free one."""
    dtype: DtypeChoice = "auto"
    """How the weights are held: fp32, bf16, int8, w8a8 (int8, and inputs are rounded to int8 too), or auto: as the folder has them."""
    device: str = "cpu"
    """Where to compute: cpu, or a device of torch such as cuda."""


def run(args: list[str]) -> int:
    parsed = parse(ExploreArgs, args, "twoscale explore")
    if not 0 <= parsed.port <= 65535:
        raise UserError("--port lies between 0 and 65535")
    try:
        from twoscale.explore.app import launch
    except ModuleNotFoundError as error:
        raise missing_package(f"the explorer needs {error.name}", "explore") from None
    session = open_session(parsed.model, parsed.dtype, parsed.device)
    sessions = [session, open_session("hops" if session.task is None else "bundled")]
    for opened in sessions:
        opened.warm_up()
    try:
        page, address = launch(sessions, parsed.host, parsed.port or None, block=False)
    except OSError as error:
        raise UserError(f"cannot listen on {parsed.host}:{parsed.port}: {error}; choose another --port") from None
    print(address, flush=True)
    say("Ctrl-C ends it")
    page.block_thread()
    return 0


def open_session(name: str, dtype: DtypeChoice = "auto", device: str = "cpu"):  # type: ignore[no-untyped-def]
    """The model with its calibration, where it has one that fits, and its task, where it was trained on one."""
    from twoscale.config.run_folder import IN_THE_PACKAGE, RunFolder
    from twoscale.explore.session import Session, load_prompts
    from twoscale.interop import find, load
    from twoscale.tasks.file import load_task
    from twoscale.tradeoff.load_run import calibration_for

    folder = find(name)
    task = load_task(RunFolder.of(folder).path)
    model, tokenizer = load(folder, dtype, device)
    if tokenizer is None:
        raise UserError(f"{folder} has no tokenizer.json: put the model's own beside its weights")
    try:
        calibrated = calibration_for(folder, model.weight_dtype)
    except UserError:
        calibrated = None
    name = name if name in IN_THE_PACKAGE else Path(folder).resolve().name
    return Session(model, tokenizer, name, calibrated, task, load_prompts(RunFolder(folder).prompts))
