"""`twoscale COMMAND ...`: finds the command, turns what users can mend into one line and exit code 2.

Every command is a module of this folder with `run(args: list[str]) -> int`; it is imported only when called.
"""

import difflib
import importlib
import os
import sys
from collections.abc import Sequence

from twoscale import __version__
from twoscale.config import UserError
from twoscale.config.errors import ProcessLost

LOST = 75  # exit code of a process that lost the others of its run: "try again", in sysexits.h
COMMANDS = {
    "prepare": "turn text into token shards",
    "train": "train a looped GPT, or go on with a run",
    "launch": "run a command in several processes, on one node or many",
    "trace": "measure the geometry of a run's loops",
    "eval": "held-out loss and bits per byte, at fixed loops or with an exit rule",
    "sweep": "measure what every exit rule saves and costs, beside the baselines",
    "calibrate": "find a threshold for each group, with a bound on what it costs",
    "generate": "write text, each token leaving the loops on its own",
    "explore": "a live page: watch the text stream, look into the loops of every token",
    "serve": "completions over HTTP for OpenAI's clients, requests batched by depth",
    "convert": "make a run of a model that came from elsewhere, or a looped model of a plain one",
    "export": "write the model as a folder that transformers opens",
    "report": "write RUN/report/index.html: figures, tables, the claims and their verdicts",
    "reproduce": "the main job in one folder: prepare, train, evaluate, trace, report; skips what is done",
    "bench": "measure speed on this machine (bench train, scale, prepare, decode, ...)",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    if args[0] in ("-V", "--version", "version"):
        print(f"twoscale {__version__}")
        return 0
    command = args[0]
    try:
        if command not in COMMANDS:
            raise UserError(_unknown(command))
        return int(importlib.import_module(f"twoscale.cli.{command}").run(args[1:]))
    except UserError as error:
        _complain(f"twoscale {command}: {error}")
        return 2
    except ProcessLost as error:
        _complain(f"twoscale {command}: {error}")
        return LOST
    except BrokenPipeError:  # the reader of a pipe has gone, as in `twoscale train --help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        _complain(f"twoscale {command}: interrupted")
        return 130
    except SystemExit as stop:  # --help
        return int(stop.code or 0)


def _unknown(command: str) -> str:
    """What to say of a command that does not exist: the nearest one, if any is near, and the list."""
    near = difflib.get_close_matches(command.lower(), COMMANDS, n=1)
    hint = f"did you mean `{near[0]}`? The commands are" if near else "choose one of"
    return f"there is no command {command!r}: {hint} {', '.join(COMMANDS)}"


def _complain(text: str) -> None:
    """An error; of several processes the first one of each node says it, because it may be wrong there alone."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(" ".join(text.split()).encode("utf-8", "backslashreplace").decode(), file=sys.stderr, flush=True)  # half a character, perhaps


def usage() -> str:
    rows = "\n".join(f"  {name:<12}{what}" for name, what in COMMANDS.items())
    first = 'a first text: twoscale generate bundled "The old man looked at the sea and"'
    return f"usage: twoscale COMMAND [options]\n\ncommands:\n{rows}\n\n`twoscale COMMAND --help` lists the options of one command.\n{first}"
