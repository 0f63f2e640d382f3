"""Configs as JSON and back, strictly: an unknown key or a value of the wrong type is named and refused."""

import dataclasses
import json
import types
import typing
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin

from twoscale.config.errors import UserError

T = TypeVar("T")


def to_dict(config: Any) -> dict[str, Any]:
    """Plain dictionaries and lists, as JSON would give them back."""
    result: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config)))
    return result


def from_dict(kind: type[T], values: Any, where: str = "config") -> T:
    """Build the dataclass `kind`; missing keys take their defaults, so that older files stay readable."""
    if not isinstance(values, dict):
        raise UserError(f"{where}: expected an object with the fields of {kind.__name__}, found {type(values).__name__}")
    hints = typing.get_type_hints(kind)
    fields = {f.name for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    if unknown := sorted(set(values) - fields):
        raise UserError(f"{where}: unknown setting {unknown[0]!r}; known are {', '.join(sorted(fields))}")
    required = [f.name for f in dataclasses.fields(kind) if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING]  # type: ignore[arg-type]
    if missing := [name for name in required if name not in values]:
        raise UserError(f"{where}: {missing[0]!r} is missing")
    return kind(**{name: _value(hints[name], value, f"{where}.{name}") for name, value in values.items()})


def read_json(path: Path) -> Any:
    """Parsed JSON, or a UserError that names the file."""
    if path.exists() and not path.is_file():  # a pipe would wait for ever
        raise UserError(f"{path} is no regular file")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not readable JSON: {error}") from None


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file, none where it does not exist; a last line that a kill cut short is left out."""
    if not path.exists():
        return []
    if not path.is_file():
        raise UserError(f"{path} is no regular file")
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    records = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            if number == len(lines):  # it has no line end: the process that wrote it was killed
                break
            raise UserError(f"{path}, line {number} is not JSON ({error}): remove the line, or move the file away") from None
        if not isinstance(record, dict):
            raise UserError(f"{path}, line {number} holds {type(record).__name__}, not an object: remove the line, or move the file away")
        records.append(record)
    return records


def read_steps(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file of which each has the number of a `step`, as metrics.jsonl and geometry.jsonl have."""
    records = read_jsonl(path)
    for record in records:
        if type(record.get("step")) is not int:
            raise UserError(f"{path}: a line has step = {record.get('step')!r}, not an integer: remove the line, or move the file away")
    return records


def _value(hint: Any, value: Any, where: str) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        return _value(next(a for a in args if a is not type(None)), value, where)
    if origin is typing.Literal:
        if value not in args:
            raise UserError(f"{where} = {value!r}: choose one of {', '.join(map(str, args))}")
        return value
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise UserError(f"{where} = {value!r}: expected a list")
        return tuple(_value(args[0], v, f"{where}[{i}]") for i, v in enumerate(value))
    if dataclasses.is_dataclass(hint):
        return from_dict(typing.cast(type, hint), value, where)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not hint:
        raise UserError(f"{where} = {value!r}: expected {hint.__name__}, found {type(value).__name__}")
    return value
