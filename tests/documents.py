"""README and docs as data: their fenced blocks, their commands, and how a dear command is made cheap for a test.

Every command runs for real, in one folder, after the commands before it in its document. What is changed, and why, is in `CHEAPER`; what is
not run at all, and why, in `NOT_RUN`.
"""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAMS = ("twoscale", "torchrun", "pip", "make", "curl", "git", "python", "python3")  # a block that starts with one holds commands

NOT_RUN = {
    r"make reproduce|make test|make test-long": "minutes; `make reproduce` is `twoscale reproduce`, run below and in test_reproduce.py",
    r"twoscale reproduce --bundled-only|twoscale export .* --measurements": "minutes, and writes into the package; see test_measured.py",
    r"pip install .*": "needs the network and changes the environment; test_install_commands looks at what it names",
}

SMALL_TRAINING = {
    "--train.steps": "2", "--train.warmup-steps": "1", "--train.batch-size": "2", "--train.micro-batch-size": "2",
    "--train.eval-sequences": "2", "--train.geometry-sequences": "1", "--train.geometry-loops": "4", "--train.compile": "off",
    "--model.block-size": "32",
}  # fmt: skip
SMALL_TASK = {
    "--train.steps": "2", "--train.batch-size": "2", "--train.eval-sequences": "2", "--train.staircase-samples": "4",
    "--train.staircase-loops": "2", "--train.geometry-interval": "0",
}  # fmt: skip
SMALL_SWEEP = {"--windows": "2", "--rounds": "1", "--loops": "4", "--taus": "0.1"}

# (what the command starts with, settings that replace or join its own, why)
CHEAPER: list[tuple[str, dict[str, str], str]] = [
    ("train --preset paper", {**SMALL_TRAINING, "--model.n-embd": "24", "--model.n-head": "2"}, "days on a GPU"),
    ("train --preset small", SMALL_TRAINING, "hours on two cores"),
    ("train --preset huginn", {**SMALL_TRAINING, "--model.n-embd": "32", "--model.mlp-hidden": "64"}, "minutes"),
    ("bench decode --speculate", {"--prompts": "1", "--repeats": "1", "--new-tokens": "3"}, "minutes"),
    ("bench decode --model", {"--repeats": "1"}, "half a minute"),
    ("train --task", SMALL_TASK, "minutes"),
    ("train --init runs/hops", SMALL_TASK, "minutes"),
    ("train --init", SMALL_TRAINING, "hours on two cores"),
    ("reproduce --preset nano", {"--train.steps": "4", "--data.max-documents": "12"}, "half a minute"),
    ("calibrate hops", {"--samples": "4", "--loops": "3", "--max-accuracy-drop": "0.9"}, "minutes"),
    ("sweep hops", {"--samples": "4", "--rounds": "1", "--loops": "3", "--max-accuracy-drop": "0.9", "--rules": "cosine"}, "minutes"),
    ("calibrate", {"--windows": "3", "--loops": "4"}, "a minute"),
    ("sweep", SMALL_SWEEP, "minutes"),
    ("trace", {"--loops": "4", "--limit-loops": "6", "--sequences": "1"}, "a minute for all checkpoints"),
    ("bench decode --dtype", {"--preset": "nano", "--contexts": "8", "--loops": "2", "--repeats": "1"}, "a minute, at the paper's size"),
    ("bench decode --kv-dtype", {"--preset": "nano", "--contexts": "8", "--loops": "2", "--repeats": "1"}, "a minute, at the paper's size"),
    ("bench load", {"--shape": "ouro-tiny", "--tokens": "1", "--dtype": "int8", "--plain": "bf16"}, "gigabytes"),
    ("bench quantize", {"--windows": "2", "--loops": "2", "--dtype": "int8"}, "minutes"),
    ("bench serve", {"--preset": "nano", "--rounds": "1", "--seconds": "0.5", "--clients": "2"}, "minutes, at the paper's size"),
    ("bench prepare", {"--megabytes": "0.2", "--files": "2", "--rounds": "1"}, "minutes"),
    ("prepare --source hf:", {"--source": "corpus/", "--subset": "", "--val-fraction": "0.3"}, "the hub is not reached by tests"),
    ("eval runs/tiny --exit", {"--windows": "4"}, "half a minute"),
    ("convert models/llama", {"--data.max-documents": "8"}, "all of Python's own English is tokenized"),
]  # fmt: skip
SOAK = {"--soak": "1"}  # ten minutes in the docs
SERVERS = ("serve", "explore")  # started, asked once, stopped


def blocks(path: Path, language: str) -> list[str]:
    """The fenced blocks of that language in a document."""
    parts = re.split(r"^```", path.read_text(), flags=re.M)
    return [body for first, _, body in (part.partition("\n") for part in parts[1::2]) if first == language]


def commands(path: Path) -> list[str]:
    """The command lines of a document, in order, without comments."""
    found = []
    for block in blocks(path, ""):
        lines = [line.split("  #")[0].strip() for line in block.splitlines()]
        if lines and lines[0].split(" ")[0] in PROGRAMS:
            found += [line for line in lines if line]
    return found


def reason_not_to_run(command: str) -> str | None:
    return next((why for pattern, why in NOT_RUN.items() if re.fullmatch(pattern, command)), None)


def arguments(command: str) -> list[str]:
    """The words after `twoscale` of a command, made cheap. Several processes become one (test_train.py runs two)."""
    words = shlex.split(re.sub(r"^(torchrun (--\S+ )+-m twoscale|twoscale launch (--\S+ \S+ )+)", "twoscale ", command))
    assert words[0] == "twoscale", f"{command!r} is neither run nor listed with a reason in NOT_RUN"
    words = words[1:]
    for start, settings, _ in CHEAPER:
        if " ".join(words).startswith(start):
            words = _with(words, settings | (SOAK if "--soak" in words else {}))
            break
    return words


def _with(words: list[str], settings: dict[str, str]) -> list[str]:
    """The words with these settings in place of their own; an empty value takes a setting away."""
    kept, skipping = [], False
    for word in words:
        if word.startswith("--"):
            skipping = word in settings
        if not skipping:
            kept.append(word)
    return kept + [part for name, value in settings.items() if value for part in (name, value)]
