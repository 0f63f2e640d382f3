"""tokenizer.json as a `tokenizers` pipeline. The file may come from a stranger: its size and what it makes of a text are bounded."""

import base64
import json
import re
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Pipeline

from twoscale.config import UserError

MAX_BYTES = 256 << 20  # the largest published ones have some 40 MB
MAX_EXPANSION = 64  # characters that a normaliser may make of one
MAX_ADDED = 64  # tokens that a post-processor may put around a text


def read_pipeline(path: Path) -> Pipeline:
    """The pipeline of a tokenizer.json; UserError where it is damaged, too large, or would expand a text without bound."""
    if not path.is_file():
        raise UserError(f"{path} is no regular file")
    if (size := path.stat().st_size) > MAX_BYTES:
        raise UserError(f"{path} has {size:,} bytes: a tokenizer has at most {MAX_BYTES:,}")
    try:
        pipeline = Pipeline.from_str(path.read_text(encoding="utf-8"))
        settings = {name: _settings(getattr(pipeline, name)) for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder")}
    except BaseException as error:
        raise tokenizer_error(error, f"{path} is no readable tokenizer") from None
    for name, found in settings.items():
        if (factor := expansion(found)) > MAX_EXPANSION:
            raise UserError(f"{path}: its {name} makes up to {factor:,} characters of one, at most {MAX_EXPANSION} are allowed")
    if (added := _added(settings["post_processor"])) > MAX_ADDED:
        raise UserError(f"{path}: its post_processor adds {added:,} tokens to a text, at most {MAX_ADDED} are allowed")
    return pipeline


def tokenizer_error(error: BaseException, what: str) -> BaseException:
    """What to raise for an error of `tokenizers`: it raises plain Exception, and PanicException where its Rust code panics."""
    if isinstance(error, UserError | MemoryError):
        return error
    if isinstance(error, Exception) or type(error).__name__ == "PanicException":
        first = (str(error).splitlines() or [type(error).__name__])[0]
        return UserError(f"{what}: {first[:200]}")
    return error


def _matches_nothing(pattern: object) -> bool:
    """Whether an expression may match between two characters; True where that cannot be told."""
    text = pattern.get("Regex") if isinstance(pattern, dict) else None
    if not isinstance(text, str) or len(text) > 1000:
        return True
    try:
        return any(found.start() == found.end() for sample in ("", "a", " a1.") for found in re.finditer(text, sample))
    except (re.error, RecursionError):
        return True


def expansion(settings: dict[str, Any]) -> int:
    """How many characters the steps of a pipeline's part may make of one, at most."""
    factor = 1
    for step in _steps(settings):
        kind = step.get("type")
        if kind == "Replace":
            content, pattern = len(str(step.get("content", ""))), step.get("pattern")
            fixed = pattern.get("String", "") if isinstance(pattern, dict) else ""
            if fixed:
                factor *= max(1, -(-content // len(fixed)))
            else:  # a regular expression may match between characters too
                factor *= content + 1 if _matches_nothing(pattern) else max(1, content)
        elif kind == "Prepend":
            factor *= max(1, len(str(step.get("prepend", ""))))
        elif kind == "Precompiled":
            longest = _longest_replacement(str(step.get("precompiled_charsmap") or ""))
            factor *= longest if longest > MAX_EXPANSION else 1  # Unicode's own forms reach 33 bytes, for very few characters
    return factor


def _steps(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """A part's steps, sequences flattened."""
    for key in ("normalizers", "pretokenizers", "decoders", "processors"):
        if isinstance(inner := settings.get(key), list):
            return [step for part in inner if isinstance(part, dict) for step in _steps(part)]
    return [settings]


def _longest_replacement(charsmap: str) -> int:
    """Bytes of the longest string in SentencePiece's table: a trie with its size in front, then strings that end in zero."""
    try:
        raw = base64.b64decode(charsmap)
    except ValueError:
        return 0
    return max((len(part) for part in raw[4 + int.from_bytes(raw[:4], "little") :].split(b"\0")), default=0)


def _added(settings: dict[str, Any]) -> int:
    """How many tokens a post-processor puts around a text."""
    total = 0
    for step in _steps(settings):
        single, tokens = step.get("single"), step.get("special_tokens")
        if isinstance(single, list):
            ids = [len(token.get("ids", [])) for token in tokens.values()] if isinstance(tokens, dict) else []
            total += len(single) * max(1, *ids, 1)
    return total


def _settings(part: Any) -> dict[str, Any]:
    found = {} if part is None else json.loads(part.__getstate__())
    return found if isinstance(found, dict) else {}
