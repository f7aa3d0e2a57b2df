"""Configuration: plain values out of YAML files and `--set` options, and sections made of them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from dflash_jax.errors import ConfigError

_Model = TypeVar("_Model", bound=BaseModel)


class Section(BaseModel):
    """A part of a configuration: immutable, and closed to keys it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class _Loader(yaml.SafeLoader):
    """YAML as people expect it: 1e-4 is a number, and a key given twice is a mistake."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str | int) and key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} is given twice", node.start_mark)
            seen.add(key if isinstance(key, str | int) else None)
        return super().construct_mapping(node, deep)


# YAML 1.1, which PyYAML implements, takes 1e-4 for a string because it has no dot.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def read_settings(
    path: str | Path, overrides: Sequence[str] = (), *, extended_by: tuple[Path, ...] = ()
) -> dict[str, Any]:
    """The values of a YAML file, with some replaced.

    A file with the key `extends` has the values of the file that it names, except for those it gives itself. Paths
    after `extends` are relative to the file's directory.

    Args:
      path: the file; its top level must be a mapping.
      overrides: texts `a.b=value`; the value is YAML, the way to it is made if it is not there.
      extended_by: the files that this one is read for because they extend it.

    Raises:
      ConfigError: the file cannot be read, is not such a file, or an override is malformed.
    """
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"there is no config file {str(path)!r}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a directory; the config must be a YAML file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise ConfigError(f"the config file {path} cannot be read ({error.strerror})") from None
    values = _parse(text, str(path))
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds {_kind(values)}; a config is a mapping such as 'target: {{path: ...}}'")
    if "extends" in values:
        values = _extended(values, Path(path), extended_by)
    for override in overrides:
        _apply(values, override)
    return values


def _extended(values: dict[str, Any], path: Path, extended_by: tuple[Path, ...]) -> dict[str, Any]:
    """The values of the file that a file extends, with the file's own over them."""
    name = values.pop("extends")
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{path}: 'extends' is {name!r}; it must be the path of another config")
    if path.resolve() in [other.resolve() for other in extended_by]:
        raise ConfigError(f"{path} extends itself, by way of {extended_by[-1]}; one of its configs must extend none")
    return _merged(read_settings(path.parent / name, extended_by=(*extended_by, path)), values)


def _merged(base: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Mappings key by key, and every other value as a whole."""
    merged = dict(base)
    for key, value in values.items():
        inner = base.get(key)
        merged[key] = _merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return merged


def _apply(values: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    path = name.strip().split(".")
    if not equals or not all(path):
        raise ConfigError(f"--set {override!r} is not an assignment; it must look like engine.max_slots=4")
    section = values
    for depth, part in enumerate(path[:-1], start=1):
        inside = section.setdefault(part, {})
        if inside is None:
            inside = section[part] = {}
        if not isinstance(inside, dict):
            raise ConfigError(f"--set {override!r}: {'.'.join(path[:depth])} is {inside!r}, which has no keys inside")
        section = inside
    section[path[-1]] = _parse(text, f"--set {override!r}")


def _parse(text: str, source: str) -> Any:
    try:
        return yaml.load(text, _Loader)  # _Loader is a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        raise ConfigError(f"{source} is not YAML{where}: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"{source} is not YAML: {reason}") from None


def _kind(value: Any) -> str:
    return "nothing" if value is None else "a list" if isinstance(value, list) else f"{value!r}"


def parse(model: type[_Model], values: Mapping[str, Any], source: str) -> _Model:
    """Builds a section from plain values.

    Args:
      model: the section's class.
      values: as read from a file.
      source: what to call the file in errors.

    Raises:
      ConfigError: a key is unknown (the message gives the nearest known one), missing, or has a bad value.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        hint = f"; {_nearest(model, first['loc'])}" if first["type"] == "extra_forbidden" else ""
        raise ConfigError(f"{source}: {fault(error)}{hint}") from None


def fault(error: ValidationError) -> str:
    """The first thing that is wrong with values, as a clause."""
    first = error.errors()[0]
    where, kind = ".".join(str(part) for part in first["loc"]), first["type"]
    if kind == "json_invalid":
        return f"it is not JSON: {first['ctx']['error'].replace('line 1 ', '')}"
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"unknown key {where!r}"
    if kind == "missing":
        return f"{where!r} is missing"
    shown = repr(first["input"])
    given = f"{repr(where) if where else 'it'} is {shown if len(shown) <= 200 else shown[:197] + '...'}"
    if kind in ("model_type", "dataclass_type"):
        return f"{given}; it must be a mapping"
    if kind != "value_error":
        return f"{given}: {first['msg'].lower()}"
    # Our own sentence. One about several keys of a section names them itself.
    reason = str(first["ctx"]["error"])
    if isinstance(first["input"], Mapping):
        return f"{where}: {reason}" if where else reason
    return f"{given}: {reason}"


def _nearest(model: type[BaseModel], location: tuple[int | str, ...]) -> str:
    """The known key nearest to the one at `location`, as a clause."""
    fields = model.model_fields
    for part in location[:-1]:
        section = fields[str(part)].annotation
        choices = [section, *getattr(section, "__args__", ())]
        fields = next(c.model_fields for c in choices if isinstance(c, type) and issubclass(c, BaseModel))
    prefix = ".".join(str(part) for part in location[:-1])
    nearest = difflib.get_close_matches(str(location[-1]), fields, n=1, cutoff=0.0)[0]
    return f"the nearest known one is {f'{prefix}.{nearest}' if prefix else nearest!r}"
