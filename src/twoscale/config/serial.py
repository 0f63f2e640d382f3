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
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not readable JSON: {error}") from None


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a JSON-lines file; a last line that a kill cut short is left out."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
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
