"""From the name of a source to its rows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from real_ray.data.arithmetic import arithmetic_rows
from real_ray.data.files import FILE_ENDINGS, read_file
from real_ray.data.hub import explain_hub_error
from real_ray.data.table import Table
from real_ray.errors import DataError
from real_ray.nearest import did_you_mean


def read_source(
    source: str, *, side: Literal["train", "eval"], named_split: str, seed: int
) -> Table:
    """Read all rows of a source.

    Args:
        source: ``arithmetic``, a file, a directory (written by ``save_to_disk`` of the datasets
            library, or a downloaded dataset repository), or a dataset name on the hub;
            a repository with several configurations as ``name:configuration``.
        side: which part of the built-in dataset.
        named_split: split of a hub dataset, or of a directory that has splits.
        seed: of the built-in dataset.

    Raises:
        DataError: nothing of that name, unreadable, unknown split, or no rows.
    """
    path = Path(source).expanduser()
    if source == "arithmetic":
        rows = arithmetic_rows(side, seed=seed)
        table = Table(source=source, columns=tuple(rows[0]), rows=rows)
    elif path.is_file():
        table = read_file(path, source=source)
    else:
        table = _read_dataset(source, split=named_split)
    if len(table.rows) == 0:
        raise DataError(f"{source}: the dataset is empty (0 rows)")
    return table


def _read_dataset(source: str, *, split: str) -> Table:
    """Read a directory or a hub dataset with the datasets library."""
    name, _, configuration = source.partition(":")
    directory = Path(name).expanduser()
    if not directory.is_dir() and _is_path(name):
        raise DataError(f"dataset {name} does not exist (looked in {Path.cwd()})")

    import datasets

    saved = [directory / file for file in ("dataset_dict.json", "state.json")]
    try:
        if any(file.is_file() for file in saved):
            loaded = datasets.load_from_disk(directory)
        else:
            loaded = datasets.load_dataset(
                str(directory) if directory.is_dir() else name, configuration or None, split=split
            )
    except Exception as error:  # a dozen types, also those of the library's back ends
        raise DataError(_explain(error, source=source, on_hub=not directory.is_dir())) from error
    if isinstance(loaded, Mapping):
        if split not in loaded:
            raise DataError(
                f"{source} has no split `{split}`{did_you_mean(split, loaded)}; "
                f"it has: {', '.join(loaded)}"
            )
        loaded = loaded[split]
    return Table(source=source, columns=tuple(loaded.column_names), rows=loaded)


def _is_path(name: str) -> bool:
    """Whether a name that is not there can only have meant a path on this machine."""
    return name.startswith(("/", "./", "../", "~")) or Path(name).suffix.lower() in FILE_ENDINGS


def _explain(error: Exception, *, source: str, on_hub: bool) -> str:
    name = source.partition(":")[0]
    if on_hub and (message := explain_hub_error(name, error, kind="dataset")):
        return message
    if "Config name is missing" in str(error):
        choices = str(error).partition("available configs: ")[2].partition("\n")[0]
        return f"{source} has several configurations, {choices}: write {name}:CONFIGURATION"
    return f"{source}: cannot be loaded: {type(error).__name__}: {error}"
