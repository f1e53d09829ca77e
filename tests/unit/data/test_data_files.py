import json
from pathlib import Path

import pytest

from real_ray.data.files import read_file
from real_ray.errors import DataError

ROWS = [{"prompt": "a, b?", "answer": "1"}, {"prompt": 'say "hi"\nplease', "answer": "007"}]


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def write_rows(path: Path) -> Path:
    if path.suffix == ".jsonl":
        return write(path, "".join(json.dumps(row) + "\n" for row in ROWS))
    if path.suffix == ".json":
        return write(path, json.dumps(ROWS))
    if path.suffix == ".csv":
        return write(path, 'prompt,answer\r\n"a, b?",1\r\n"say ""hi""\nplease",007\r\n')
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(ROWS), path)
    return path


@pytest.mark.parametrize("ending", [".jsonl", ".json", ".csv", ".parquet"])
def test_every_format_gives_the_same_rows(tmp_path: Path, ending: str) -> None:
    table = read_file(write_rows(tmp_path / f"sums{ending}"), source="sums")
    assert list(table.rows) == ROWS  # "007" is still text
    assert table.columns == ("prompt", "answer")


@pytest.mark.parametrize("ending", [".jsonl", ".json", ".csv"])
def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path, ending: str) -> None:
    path = write_rows(tmp_path / f"sums{ending}")
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert read_file(path, source="sums").columns == ("prompt", "answer")


def test_blank_lines_count_as_lines_but_not_as_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", '\n{"a": 1}\n\n{"a": 2, "b": 3}\n\n')
    table = read_file(path, source="x.jsonl")
    assert [table.place(i) for i in range(len(table.rows))] == ["x.jsonl:2", "x.jsonl:4"]
    assert table.columns == ("a", "b")


def test_a_csv_row_is_placed_at_the_line_where_it_starts(tmp_path: Path) -> None:
    path = write(tmp_path / "x.csv", 'a,b\n"1\n1\n1",2\n\n3,4\n')
    assert read_file(path, source="x.csv").lines == [2, 6]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl", '{"a": 1}\n{"a": 2\n', r"x\.jsonl:2: not valid JSON: Expecting ',' .* column"),
        ("x.jsonl", b'{"a": 1}\n{"a": "\xff"}\n', r"x\.jsonl:2: not valid JSON: 'utf-8' codec"),
        ("x.jsonl", '{"a": 1}\n[1]\n', r"x\.jsonl:2: expected one JSON object .* got list"),
        ("x.json", '[\n{"a": 1},\n{"a" 2}]', r"x\.json:3: not valid JSON: Expecting ':'"),
        ("x.json", '{"a": 1}\n{"a": 2}\n', r"x\.json:2: .* give it the ending \.jsonl"),
        ("x.json", '{"a": 1}', r"x\.json: expected a list of JSON objects, got dict"),
        ("x.json", '[{"a": 1}, 3]', r"x\.json, row 1 \(counted from 0\): .* got int"),
        ("x.csv", "a,b\n1,2\n3\n", r"x\.csv:3: 1 cells, but the header has 2 columns"),
        ("x.csv", 'a,b\n1,2\n"3,4\n', r"x\.csv:3: not valid CSV: unexpected end of data"),
        ("x.csv", b"a,b\n1,\xff\n", r"x\.csv: not UTF-8 text"),
        ("x.parquet", "not parquet", r"x\.parquet: not a readable Parquet file"),
        ("x.txt", "1", r"x\.txt: unsupported file ending `\.txt`; use one of \.jsonl, \.json"),
    ],
)
def test_bad_files_are_refused_with_their_place(
    tmp_path: Path, name: str, content: str | bytes, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        read_file(write(tmp_path / name, content), source=name)


def test_a_file_that_cannot_be_opened_says_why(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").mkdir()
    with pytest.raises(DataError, match=r"x\.jsonl: cannot be read: Is a directory"):
        read_file(tmp_path / "x.jsonl", source="x.jsonl")
