"""YAML as people expect it, with the line of every key.

Numbers, booleans and nulls follow YAML 1.2: ``2e-6`` is a number; ``on``, ``yes``, ``010``,
``1_000`` and dates are text, which the schema then accepts or refuses by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar

import yaml
from yaml.constructor import ConstructorError
from yaml.reader import ReaderError

from real_ray.errors import ConfigError

Location = tuple[str | int, ...]  # ("rollout", "stop", 0)

_FLOAT = re.compile(
    r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?\Z|[-+]?[0-9]+[eE][-+]?[0-9]+\Z"
    r"|[-+]?\.(?:inf|Inf|INF)\Z|\.(?:nan|NaN|NAN)\Z"
)
_RESOLVERS = {
    "bool": (re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z"), "tTfF"),
    "null": (re.compile(r"(?:~|null|Null|NULL|)\Z"), ["~", "n", "N", ""]),
    "int": (re.compile(r"[-+]?(?:0|[1-9][0-9]*)\Z"), "-+0123456789"),
    "float": (_FLOAT, "-+.0123456789"),
}


class Loader(yaml.SafeLoader):
    """Only the core types of YAML 1.2; any other tag is an error."""

    yaml_constructors: ClassVar[dict[str | None, Any]] = {
        None: yaml.SafeLoader.construct_undefined,
        **{
            f"tag:yaml.org,2002:{kind}": getattr(yaml.SafeLoader, f"construct_yaml_{kind}")
            for kind in (*_RESOLVERS, "seq", "map")
        },
    }


class TextLoader(Loader):
    """Every scalar is text."""


class Dumper(yaml.SafeDumper):
    """Quotes all text that YAML 1.1 or 1.2 would take for something else."""


def _construct_text(loader: Loader, node: yaml.ScalarNode) -> str:
    # JSON, a part of YAML, writes an emoji as two surrogates.
    return loader.construct_scalar(node).encode("utf-16", "surrogatepass").decode("utf-16")


def _represent_text(dumper: Dumper, text: str) -> yaml.ScalarNode:
    # Only in double quotes do all line breaks and control characters survive.
    style = None if text.isprintable() else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


Loader.add_constructor("tag:yaml.org,2002:str", _construct_text)
Loader.yaml_implicit_resolvers = {}
TextLoader.yaml_implicit_resolvers = {}
for _kind, (_pattern, _first) in _RESOLVERS.items():
    Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", _pattern, list(_first))
Dumper.add_representer(str, _represent_text)
Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


@dataclass(slots=True, kw_only=True)
class Document:
    """A YAML file of sections, not validated yet."""

    values: dict[str, Any] = field(default_factory=dict)
    lines: dict[Location, int] = field(default_factory=dict)  # from 1
    problems: list[str] = field(default_factory=list)  # repeated keys


def read_yaml(path: Path) -> Document:
    """Read a config file.

    Raises:
        ConfigError: the file is missing, unreadable, not UTF-8, not YAML, or not a mapping.
    """
    text = _read_text(path)
    document = Document()
    with _syntax_errors(text, file=path):
        loader = Loader(text)
        root = loader.get_single_node()
        if root is None:
            return document
        if not isinstance(root, yaml.MappingNode):
            kind = "a list" if isinstance(root, yaml.SequenceNode) else "a single value"
            raise ConfigError(
                f"{path}:{root.start_mark.line + 1}: the file must hold sections with keys below "
                f"them (got {kind}). Write it as in `loss: {{tau: 0.5}}`"
            )
        for name, node in _items(path, document, (), root):
            if not isinstance(node, yaml.MappingNode):
                document.values[name] = _construct(loader, node)
                continue
            section = document.values[name] = {}
            for key, value in _items(path, document, (name,), node):
                section[key] = _construct(loader, value)
                if isinstance(value, yaml.SequenceNode):
                    for index, item in enumerate(value.value):
                        document.lines[name, key, index] = item.start_mark.line + 1
    return document


def parse_value(text: str, *, flag: str, as_text: bool = False) -> Any:
    """Parse the value of a flag; ``as_text`` keeps all scalars in it as they are written.

    Raises:
        ConfigError: it is not YAML.
    """
    with _syntax_errors(text, flag=flag):
        loader = TextLoader(text) if as_text else Loader(text)
        node = loader.get_single_node()
        return None if node is None else _construct(loader, node)


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such config file. {_near_files(path)}") from None
    except IsADirectoryError:
        raise ConfigError(
            f"{path}: this is a directory. Give the path of a YAML file in it"
        ) from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigError(
            f"{path}:{line}: not UTF-8 (got byte 0x{error.object[error.start]:02x}). "
            "Save the file as UTF-8"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read: {error.strerror}. Check the path and its permissions"
        ) from None


def _near_files(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f"There is no directory {folder} either"
    files = {f.stem: f for f in sorted(folder.iterdir()) if f.suffix in (".yaml", ".yml")}
    if near := get_close_matches(path.stem, files):
        return f"Did you mean {' or '.join(str(files[stem]) for stem in near)}?"
    return "Check the path"


def _items(
    path: Path, document: Document, parent: Location, mapping: yaml.MappingNode
) -> Iterator[tuple[str, yaml.Node]]:
    for key, value in mapping.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            raise ConstructorError(None, None, "a key must be a single word", key.start_mark)
        location = (*parent, key.value)
        if location not in document.lines:
            document.lines[location] = line
            yield key.value, value
            continue
        document.problems.append(
            f"{path}:{line}: {'.'.join(map(str, location))}: repeated key, first on line "
            f"{document.lines[location]}. Keep one of the two"
        )


def _construct(loader: Loader, node: yaml.Node) -> Any:
    try:
        return loader.construct_object(node, deep=True)
    except (ValueError, KeyError) as error:  # as in `!!int x`
        raise ConstructorError(None, None, f"no such value: {error}", node.start_mark) from None


@contextmanager
def _syntax_errors(text: str, *, file: Path | None = None, flag: str = "") -> Iterator[None]:
    place, what = "", ""
    try:
        yield
        return
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        if mark is not None:
            place = f":{mark.line + 1}:{mark.column + 1}"
        what = ", ".join(filter(None, (error.problem, error.context)))
    except ReaderError as error:
        line_start = text.rfind("\n", 0, error.position) + 1
        place = f":{text.count(chr(10), 0, error.position) + 1}:{error.position - line_start + 1}"
        what = f"the character {error.character!r} is not allowed"
    except RecursionError:
        what = "brackets are nested too deeply"
    raise ConfigError(
        f"{flag or f'{file}{place}'}: not valid YAML: {what}. "
        + (
            "Indent with spaces, not tabs"
            if "'\\t'" in what
            else "Check indentation, quotes, colons and brackets there"
        )
    )
