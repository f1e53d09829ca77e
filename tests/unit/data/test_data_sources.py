from pathlib import Path

import datasets
import huggingface_hub
import pytest

from real_ray.data.sources import read_source
from real_ray.data.table import Table
from real_ray.errors import DataError

ONE = [{"prompt": "1 + 1?", "answer": "2"}]
TWO = [{"prompt": "2 + 2?", "answer": "4"}, {"prompt": "2 + 3?", "answer": "5"}]


@pytest.fixture(autouse=True)
def _own_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


def read(source: str | Path, split: str = "train") -> Table:
    return read_source(str(source), side="train", named_split=split, seed=0)


def test_arithmetic_is_built_in() -> None:
    table = read("arithmetic")
    assert (len(table.rows), table.columns) == (68, ("prompt", "answer"))


def test_a_file_is_read_by_its_ending(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"prompt": "1 + 1?", "answer": "2"}\n')
    assert list(read(path).rows) == ONE


def test_a_saved_dataset_has_no_splits(tmp_path: Path) -> None:
    datasets.Dataset.from_list(TWO).save_to_disk(tmp_path / "saved")
    assert list(read(tmp_path / "saved", split="whatever").rows) == TWO


def test_a_saved_dataset_dict_is_read_by_split(tmp_path: Path) -> None:
    splits = {"train": datasets.Dataset.from_list(ONE), "test": datasets.Dataset.from_list(TWO)}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")
    assert list(read(tmp_path / "saved", split="test").rows) == TWO
    with pytest.raises(DataError, match=r"no split `tests` \(did you mean `test`\?\); it has: tra"):
        read(tmp_path / "saved", split="tests")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A downloaded dataset repository with the configurations main (train, test) and hard."""
    path = tmp_path / "repository"
    path.mkdir()
    (path / "README.md").write_text(
        "---\nconfigs:\n"
        "- config_name: main\n  data_files:\n"
        "  - {split: train, path: one.jsonl}\n  - {split: test, path: two.jsonl}\n"
        "- config_name: hard\n  data_files: two.jsonl\n---\n"
    )
    datasets.Dataset.from_list(ONE).to_json(path / "one.jsonl")
    datasets.Dataset.from_list(TWO).to_json(path / "two.jsonl")
    return path


def test_a_repository_is_read_by_configuration_and_split(repository: Path) -> None:
    assert list(read(f"{repository}:main").rows) == ONE
    assert list(read(f"{repository}:main", split="test[1:]").rows) == TWO[1:]


@pytest.mark.parametrize(
    ("suffix", "split", "message"),
    [
        (":main", "validation", r'Unknown split "validation"\. Should be one of \[.train., .test'),
        ("", "train", r"several configurations, \['main', 'hard'\]: write .*:CONFIGURATION"),
        (":medium", "train", r"'medium' not found\. Available: \['main', 'hard'\]"),
    ],
)
def test_what_a_repository_does_not_have_is_named(
    repository: Path, suffix: str, split: str, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        read(f"{repository}{suffix}", split=split)


@pytest.mark.parametrize("name", ["no/such/file.jsonl", "./nothing", "/nothing/here:main", "x.csv"])
def test_a_missing_path_is_not_looked_up_on_the_hub(name: str) -> None:
    with pytest.raises(DataError, match=r"does not exist \(looked in"):
        read(name)


@pytest.mark.parametrize(
    ("name", "content"), [("x.jsonl", "\n"), ("x.json", "[]"), ("x.csv", "prompt,answer\n")]
)
def test_no_rows_are_an_error(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=r"the dataset is empty \(0 rows\)"):
        read(tmp_path / name)


def test_a_directory_without_data_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    with pytest.raises(DataError, match="doesn't contain any data files"):
        read(tmp_path / "nothing")


def test_offline_says_how_to_download_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match=r"HF_HUB_OFFLINE.*`hf download a/b --repo-type dataset`"):
        read("a/b:main")
