"""Builds a server from its settings: `twoscale serve` does it in its own process, with --replicas every replica does it in its process."""

from dataclasses import dataclass, field
from pathlib import Path

from twoscale.config import UserError
from twoscale.config.dtypes import DtypeChoice, KVDtype
from twoscale.config.run_folder import RunFolder
from twoscale.engine.policy import choose_policy
from twoscale.engine.scheduler import Scheduler
from twoscale.engine.speculation import OFF, Speculation
from twoscale.interop import find, load
from twoscale.serve.limits import Limits
from twoscale.serve.server import Server
from twoscale.tradeoff.load_run import calibration_for


@dataclass(frozen=True)
class Settings:
    """Which model is served, and how; the fields are explained in the options of `twoscale serve` (cli/serve.py)."""

    model: str
    policy: str = "auto"
    max_num_seqs: int = 32
    cache_mb: int = 1024
    key: str | None = field(default=None, repr=False)
    limits: Limits = field(default_factory=Limits)
    speculate: Speculation = OFF
    dtype: DtypeChoice = "auto"
    device: str = "cpu"
    kv_dtype: KVDtype = "auto"


def name_of(model: str, folder: Path) -> str:
    """The name by which clients ask for a model."""
    return model if model == "bundled" else folder.resolve().name


def build_server(settings: Settings) -> tuple[Server, str]:
    """The server, and an explanation of its scheduling policy to print. Its scheduler thread is not started yet. Models without loops are
    served too."""
    folder = find(settings.model)
    model, tokenizer = load(folder, settings.dtype, settings.device)
    if tokenizer is None:
        raise UserError(f"{folder} has no tokenizer.json: put the model's own beside its weights")
    try:
        calibration = calibration_for(folder, model.weight_dtype) if model.config.n_groups else None
        uncalibrated = ""
    except UserError as error:
        calibration, uncalibrated = None, f"; no exit=auto: {error}" if RunFolder.of(folder).calibration.exists() else ""
    policy, why = choose_policy(model, settings.max_num_seqs) if settings.policy == "auto" else (settings.policy, settings.policy)
    scheduler = Scheduler(model, policy, max_num_seqs=settings.max_num_seqs, cache_bytes=settings.cache_mb << 20)
    name = name_of(settings.model, folder)
    server = Server(
        model, tokenizer, name, scheduler, calibration=calibration, limits=settings.limits, key=settings.key, speculate=settings.speculate,
        kv_dtype=settings.kv_dtype,
    )  # fmt: skip
    return server, why + uncalibrated
