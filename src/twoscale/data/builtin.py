"""The built-in corpus: English prose that every Python carries, so that a first run needs no download.

The language reference that `help()` prints (pydoc's topics), and the docstrings of the standard library. The
modules are parsed, never imported. About 2 MB; the exact text depends on the Python at hand.
"""

import ast
import sysconfig
from collections.abc import Iterator
from pathlib import Path

SKIPPED = {"test", "tests", "site-packages", "dist-packages", "__pycache__", "idlelib", "lib2to3", "turtledemo", "pydoc_data", "encodings"}
SHORTEST = 200  # characters; shorter docstrings are labels, not prose


def builtin_documents() -> Iterator[str]:
    """Documents in a fixed order: topics by name, then modules by path, one document a module."""
    from pydoc_data import topics

    for name in sorted(topics.topics):
        yield topics.topics[name].strip()
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(library.rglob("*.py")):
        relative = path.relative_to(library)
        if SKIPPED.isdisjoint(relative.parts) and (text := _docstrings(path)):
            yield text


def _docstrings(path: Path) -> str:
    """The docstrings of one module, in the order of the source."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError, ValueError):
        return ""  # a broken or foreign file in somebody's installation is no concern of ours
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = sorted((n for n in ast.walk(tree) if isinstance(n, kinds)), key=lambda n: getattr(n, "lineno", 0))
    texts = [ast.get_docstring(node) or "" for node in nodes]
    return "\n\n".join(t.strip() for t in texts if len(t) >= SHORTEST)
