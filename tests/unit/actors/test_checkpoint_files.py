"""Which checkpoints of a run are kept, and which one it goes on from."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from actors.checkpoint_files import (
    CheckpointFacts,
    begin,
    complete,
    newest_complete,
    partial_of,
    remove_older,
)


def save(checkpoints: Path, number: int) -> Path:
    directory = checkpoints / f"step_{number:06d}"
    begin(directory)
    (partial_of(directory) / "driver.json").write_text("{}")
    facts = CheckpointFacts(
        policy_version=number,
        world_size=1,
        zero_stage=0,
        dtype="float32",
        base_model="none",
        trust_remote_code=False,
        lora_rank=0,
        lora_alpha=1.0,
        lora_target_modules=(),
    )
    complete(directory, facts=facts, parameters={})
    return directory


def left(checkpoints: Path) -> list[str]:
    return sorted(path.name for path in checkpoints.iterdir())


class TestRemoveOlder:
    @pytest.mark.parametrize(
        ("keep", "expected"),
        [(1, [12]), (2, [9, 12]), (3, [3, 9, 12]), (4, [2, 3, 9, 12]), (9, [2, 3, 9, 12])],
    )
    def test_the_newest_are_kept(self, tmp_path: Path, keep: int, expected: list[int]) -> None:
        for number in (9, 2, 3, 12):
            newest = save(tmp_path, number)
        remove_older(newest, keep=keep)
        assert left(tmp_path) == [f"step_{number:06d}" for number in expected]

    def test_nothing_but_older_complete_checkpoints_is_touched(self, tmp_path: Path) -> None:
        save(tmp_path, 4)
        (save(tmp_path, 6) / "driver.json").unlink()
        (tmp_path / "step_000007").mkdir()
        (tmp_path / "step_of_mine").mkdir()
        (tmp_path / "notes").write_text("")
        save(tmp_path, 20)  # of before the run went back
        remove_older(save(tmp_path, 8), keep=1)
        assert left(tmp_path) == [
            "notes", "step_000006", "step_000007", "step_000008", "step_000020", "step_of_mine",
        ]  # fmt: skip

    def test_a_removal_that_fails_is_a_warning_and_the_others_go_on(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        for number in (1, 2, 3):
            newest = save(tmp_path, number)
        (tmp_path / ".step_000001.removed").write_text("no directory")
        with caplog.at_level(logging.WARNING):
            remove_older(newest, keep=1)
        assert "step_000001 cannot be removed" in caplog.text
        assert left(tmp_path) == [".step_000001.removed", "step_000001", "step_000003"]

    def test_what_a_dead_run_left_half_removed_goes_too(self, tmp_path: Path) -> None:
        save(tmp_path, 1).rename(tmp_path / ".step_000001.removed")
        remove_older(save(tmp_path, 2), keep=2)
        assert left(tmp_path) == ["step_000002"]


class TestNewestComplete:
    def test_damaged_ones_are_left_out_with_a_reason(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        checkpoints = tmp_path / "checkpoints"
        expected = save(checkpoints, 9)
        save(checkpoints, 8)
        (save(checkpoints, 10) / "driver.json").write_text("{")
        shutil.rmtree(save(checkpoints, 11))
        (checkpoints / "step_000012").mkdir()
        (checkpoints / "step_of_mine").mkdir()
        begin(checkpoints / "step_000013")
        with caplog.at_level(logging.WARNING):
            assert newest_complete(tmp_path) == expected
        reasons = [record.getMessage() for record in caplog.records]
        assert len(reasons) == 2
        assert "step_000012 has no checkpoint.json" in reasons[0]
        assert "step_000010/driver.json has 1 bytes, expected 2" in reasons[1]

    def test_one_that_was_about_to_be_replaced_is_found(self, tmp_path: Path) -> None:
        directory = save(tmp_path / "checkpoints", 5)
        directory.rename(directory.with_name(".step_000005.replaced"))
        assert newest_complete(tmp_path) == directory

    @pytest.mark.parametrize("place", ["checkpoints", "."])
    def test_a_run_without_any(self, tmp_path: Path, place: str) -> None:
        (tmp_path / place).mkdir(exist_ok=True)
        assert newest_complete(tmp_path) is None
        assert newest_complete(tmp_path / "no run") is None
