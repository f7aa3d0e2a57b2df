"""Configuration: plain values out of YAML files and `--set` options, and sections made of them."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from dflash_jax.errors import ConfigError, cut, quote
from dflash_jax.streams import STDIN, open_stream

_Model = TypeVar("_Model", bound=BaseModel)

MAX_BYTES = 1 << 18
"""Of a config. A machine may write one, but no config of this package needs a tenth of it."""

MAX_VALUES = 100_000
"""In a config, with each alias counted as what it stands for."""

_MAX_NUMBER = 400
"""Characters of a number. Python needs ever longer for longer ones, and no setting takes one."""


class Section(BaseModel):
    """A part of a configuration: immutable, and closed to keys it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def _check_path(path: str) -> str:
    if not path:
        raise ValueError("a path has at least one character")
    if "\0" in path:
        raise ValueError("a path cannot have a NUL character")
    return os.path.expanduser(path)


PathText = Annotated[str, AfterValidator(_check_path)]
"""A path, or another name of a file, as a config gives it; ~ is the home directory."""


_MERGE = "tag:yaml.org,2002:merge"
"""Of the key `<<`."""


# PyYAML has its C parser, many times faster, only where it was built with libyaml.
class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """YAML as people expect it: 1e-4 is a number, and a key given twice is a mistake.

    Of a key that is merged (`<<`), the mapping's own value counts, else that of the first mapping merged which has it.
    """

    def construct_document(self, node: yaml.Node) -> Any:
        # Before any mapping is built: building one writes what it merges into the nodes it merges.
        for mapping in _check_size(node):
            self._check_keys(mapping)
        return super().construct_document(node)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        # PyYAML 6.0.4 chooses among equal keys by whether Python happens to hold their texts as one object.
        merged: list[tuple[yaml.Node, yaml.Node]] = []
        for key, value in node.value:
            if key.tag == _MERGE:
                # Of equal keys the last one counts.
                for source in reversed(value.value) if isinstance(value, yaml.SequenceNode) else [value]:
                    if not isinstance(source, yaml.MappingNode):
                        problem = f"what is merged must be a mapping or a list of mappings, not a {source.id}"
                        raise yaml.constructor.ConstructorError(None, None, problem, source.start_mark)
                    self.flatten_mapping(source)
                    merged += source.value
        node.value = merged + [pair for pair in node.value if pair[0].tag != _MERGE]

    def _check_keys(self, mapping: yaml.MappingNode) -> None:
        seen: set[Any] = set()
        for node, _ in mapping.value:
            if isinstance(node, yaml.ScalarNode):
                key = node.value if node.tag == _MERGE else self.construct_object(node)
                if key in seen:
                    problem = f"the key {quote(key)} is given twice"
                    raise yaml.constructor.ConstructorError(None, None, problem, mapping.start_mark)
                seen.add(key)


def _check_size(root: yaml.Node) -> list[yaml.MappingNode]:
    """Refuses numbers without end, and aliases that unfold without end, before anything is built of them.

    Returns:
      Each mapping, once.
    """
    mappings: list[yaml.MappingNode] = []
    sizes: dict[int, int] = {}
    # A value is on the stack twice: once to look inside, once to add up what is inside.
    stack, within = [(root, False)], set()
    while stack:
        node, looked = stack.pop()
        if isinstance(node, yaml.ScalarNode):
            if len(node.value) > _MAX_NUMBER and node.tag.endswith((":int", ":float")):
                raise _too_much(node, f"a number of {len(node.value)} characters; it may have {_MAX_NUMBER}")
            sizes[id(node)] = 1
        elif looked:
            within.discard(id(node))
            sizes[id(node)] = 1 + sum(sizes[id(child)] for child in _children(node))
            if sizes[id(node)] > MAX_VALUES:
                raise _too_much(node, f"more than {MAX_VALUES:,} values, with aliases unfolded")
        elif id(node) in within:
            raise _too_much(node, "an alias to itself")
        elif id(node) not in sizes:
            if isinstance(node, yaml.MappingNode):
                mappings.append(node)
            within.add(id(node))
            stack.append((node, True))
            stack.extend((child, False) for child in _children(node))
    return mappings


def _children(node: yaml.Node) -> Iterator[yaml.Node]:
    for child in node.value:
        yield from child if isinstance(child, tuple) else (child,)


def _too_much(node: yaml.Node, problem: str) -> yaml.MarkedYAMLError:
    return yaml.constructor.ConstructorError(None, None, f"there is {problem}", node.start_mark)


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
      path: the file; its top level must be a mapping. "-" is the standard input.
      overrides: texts `a.b=value`; the value is YAML, missing sections on the way to it are added.
      extended_by: the files that this one is read for because they extend it.

    Raises:
      ConfigError: the file cannot be read, is not such a file, or an override is malformed.
    """
    source = describe_source(path)
    try:
        text = _read_bytes(path).decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"there is no config file {quote(str(path))}") from None
    except IsADirectoryError:
        raise ConfigError(f"{source} is a directory; the config must be a YAML file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source} is not UTF-8 text (byte {error.start})") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"the config file {quote(str(path))} cannot be read ({reason})") from None
    values = _parse(text, source)
    if not isinstance(values, dict):
        raise ConfigError(f"{source} holds {_kind(values)}; a config is a mapping such as 'target: {{path: ...}}'")
    if "extends" in values:
        values = _extended(values, Path(path), extended_by)
    for override in overrides:
        _apply(values, override)
    return values


def _extended(values: dict[str, Any], path: Path, extended_by: tuple[Path, ...]) -> dict[str, Any]:
    """The values of the file that a file extends, with the file's own over them."""
    name = values.pop("extends")
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{path}: 'extends' is {quote(name)}; it must be the path of another config")
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


def describe_source(path: str | Path, overrides: Sequence[str] = ()) -> str:
    """What to call a config in errors."""
    name = "the config on the standard input" if str(path) == STDIN else cut(str(path))
    return cut(f"{name} with --set {' --set '.join(overrides)}", 400) if overrides else name


def _read_bytes(path: str | Path) -> bytes:
    with open_stream(path) as file:
        found = file.read(MAX_BYTES + 1)
    if len(found) > MAX_BYTES:
        raise ConfigError(f"{describe_source(path)} has more than {MAX_BYTES >> 10} KiB; a config is smaller")
    return found


def _apply(values: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    path = name.strip().split(".")
    if not equals or not all(path):
        raise ConfigError(f"--set {quote(override)} is not an assignment; it must look like engine.max_slots=4")
    section = values
    for depth, part in enumerate(path[:-1], start=1):
        inside = section.setdefault(part, {})
        if inside is None:
            inside = section[part] = {}
        if not isinstance(inside, dict):
            where = cut(".".join(path[:depth]))
            raise ConfigError(f"--set {quote(override)}: {where} is {quote(inside)}, which has no keys inside")
        section = inside
    # In YAML a lone dash is a list of nothing; on a command line it is the standard input.
    section[path[-1]] = STDIN if text.strip() == STDIN else _parse(text, f"--set {quote(override)}")


def _parse(text: str, source: str) -> Any:
    _check_characters(text, source)
    try:
        values = yaml.load(text, _Loader)  # _Loader is a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        raise ConfigError(f"{source} is not YAML{where}: {cut(str(error.problem or error.context))}") from None
    except (TypeError, AttributeError, LookupError):
        # This is how PyYAML takes `!!bool x` and the like.
        raise ConfigError(f"{source} is not YAML: a tag, such as !!int, does not fit its value") from None
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"{source} is not YAML: {cut(reason)}") from None
    _check_characters(values, source)
    return values


def _check_characters(root: Any, source: str) -> None:
    """Refuses strings that no file, terminal or tokenizer takes, wherever they are."""
    stack = [root]
    while stack:
        value = stack.pop()
        if isinstance(value, str) and not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError:
                raise ConfigError(
                    f"{source} has {quote(value)}, with half of a surrogate pair, which is no character"
                ) from None
        elif isinstance(value, dict):
            stack.extend(value)
            stack.extend(value.values())
        elif isinstance(value, list | tuple | set):
            stack.extend(value)


def _kind(value: Any) -> str:
    return "nothing" if value is None else "a list" if isinstance(value, list) else quote(value)


def parse(model: type[_Model], values: Mapping[str, Any], source: str) -> _Model:
    """Builds a section from plain values.

    Args:
      model: the section's class.
      values: as read from a file.
      source: what to call the file in errors.

    Raises:
      ConfigError: a key is unknown (the message gives the nearest known one, or all), missing, or has a bad value.
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
    where, kind = cut(".".join(str(part) for part in first["loc"])), first["type"]
    if kind == "json_invalid":
        return f"it is not JSON: {first['ctx']['error'].replace('line 1 ', '')}"
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"unknown key {where!r}"
    if kind == "missing":
        return f"{where!r} is missing"
    given = f"{repr(where) if where else 'it'} is {quote(first['input'])}"
    if kind in ("model_type", "dataclass_type"):
        return f"{given}; it must be a mapping"
    if kind != "value_error":
        return f"{given}: {cut(first['msg'].lower())}"
    # Our own sentence. One about several keys of a section names them itself.
    reason = str(first["ctx"]["error"])
    if isinstance(first["input"], Mapping):
        return f"{where}: {reason}" if where else reason
    return f"{given}: {reason}"


def suggest(name: str, known: Collection[str], prefix: str = "") -> str:
    """What an unknown name may have been meant to be, as a clause: the nearest known name, or all if none is near.

    Args:
      name: the unknown one.
      known: the names there are, in the order to list them in.
      prefix: goes before each of them.
    """
    # Comparing takes time with the square of the length, and nobody means a short name by one of a page.
    near = difflib.get_close_matches(name, known, n=1) if len(name) <= 64 else []
    if near:
        return f"the nearest known one is {prefix + near[0]!r}"
    return f"the known ones are {', '.join(prefix + each for each in known)}"


def _nearest(model: type[BaseModel], location: tuple[int | str, ...]) -> str:
    fields = model.model_fields
    for part in location[:-1]:
        if isinstance(part, str) and part in fields:
            section = fields[part].annotation
            choices = [section, *getattr(section, "__args__", ())]
            fields = next((c.model_fields for c in choices if isinstance(c, type) and issubclass(c, BaseModel)), fields)
    prefix = "".join(f"{part}." for part in location[:-1])
    return suggest(str(location[-1]), fields, prefix)
