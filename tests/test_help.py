"""`--help` of every command is quick: it imports the argument parser and the settings, nothing that computes."""

import subprocess
import sys

import pytest

from twoscale.cli.main import COMMANDS

SCRIPT = """
import sys
from twoscale.cli.main import main
code = main(sys.argv[1:])
heavy = ("torch", "numpy", "matplotlib", "plotly", "tokenizers", "safetensors", "pyarrow", "transformers", "gradio", "fastapi")
print("imported:", *[name for name in heavy if name in sys.modules], file=sys.stderr)
sys.exit(code)
"""
BENCHES = [("bench", kind) for kind in ("train", "scale", "prepare", "trace", "decode", "serve", "load", "quantize")]


@pytest.mark.parametrize("words", [(), *((name,) for name in COMMANDS), *BENCHES], ids=lambda words: " ".join(words) or "twoscale")
def test_help_imports_nothing_heavy(words: tuple[str, ...]) -> None:
    """`--help` leaves with code 0, names the command, and has imported neither torch nor numpy nor any figure library."""
    result = subprocess.run([sys.executable, "-c", SCRIPT, *words, "--help"], capture_output=True, text=True)
    assert result.returncode == 0 and " ".join(("usage: twoscale", *words)) in result.stdout
    assert result.stderr.strip() == "imported:"
