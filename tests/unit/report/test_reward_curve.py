"""The picture of a run, read back as pixels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from matplotlib.image import imread

from real_ray.report.reward_curve import draw_reward_curve

DOTS, LINE, ACCURACY = (0x9E, 0xC5, 0xE8), (0x1F, 0x5F, 0x99), (0xD1, 0x66, 0x1F)
LEGEND = 490  # first row of pixels of the legend, which shows the colours too
Pixels = npt.NDArray[np.int_]  # [n, 2]: row from the top, column


def draw(
    tmp_path: Path,
    rewards: Sequence[float],
    *,
    accuracy: Sequence[tuple[int, float]] = (),
    window: int = 3,
    title: str = "demo",
    first_step: int = 1,
) -> dict[tuple[int, int, int], Pixels]:
    """Where the picture has each of the colours."""
    path = tmp_path / "curve.png"
    points = list(enumerate(rewards, first_step))
    draw_reward_curve(points, path, title=title, accuracy=accuracy, window=window)
    assert path.read_bytes().startswith(b"\x89PNG\r\n")
    image = np.round(imread(path)[:, :, :3] * 255)
    assert image.shape == (540, 960, 3)
    plot = image[:LEGEND]
    return {c: np.argwhere((plot == c).all(axis=-1)) for c in (DOTS, LINE, ACCURACY)}


def height(pixels: Pixels) -> int:
    return int(np.ptp(pixels[:, 0])) if len(pixels) else 0


def ends(pixels: Pixels) -> tuple[tuple[int, int], tuple[int, int]]:
    """Row and column of the leftmost and of the rightmost pixel."""
    in_order = sorted(map(tuple, pixels.tolist()), key=lambda pixel: pixel[1])
    return in_order[0], in_order[-1]


@pytest.mark.parametrize("rewards", [[0.0, 0.2, 0.5, 1.0], [1.0, 0.5, 0.2, 0.0]])
def test_a_better_step_is_higher(tmp_path: Path, rewards: list[float]) -> None:
    seen = draw(tmp_path, rewards)
    for colour in (DOTS, LINE):
        (first, _), (last, _) = ends(seen[colour])
        assert (last < first) is (rewards[-1] > rewards[0])
        assert abs(last - first) > 100
    assert len(seen[ACCURACY]) == 0


@pytest.mark.parametrize(("window", "is_flat"), [(1, False), (2, True), (3, False)])
def test_the_line_is_the_mean_of_the_last_steps(tmp_path: Path, window: int, is_flat: bool) -> None:
    line = draw(tmp_path, [0.0, 1.0] * 4, window=window)[LINE]
    right_half = line[line[:, 1] > 500]
    assert (height(right_half) < 10) is is_flat


def test_evaluations_are_shown_at_their_step(tmp_path: Path) -> None:
    seen = draw(tmp_path, [0.5] * 4, accuracy=[(0, 0.25), (4, 0.75)])
    (before_row, before_column), (after_row, after_column) = ends(seen[ACCURACY])
    (_, first_step), (_, last_step) = ends(seen[DOTS])
    assert before_column < first_step - 50, "before the first step"
    assert abs(after_column - last_step) < 20, "after the last step"
    assert after_row < before_row - 50, "the better, the higher"


def test_a_run_that_begins_from_a_checkpoint_begins_at_its_step(tmp_path: Path) -> None:
    seen = draw(tmp_path, [0.5] * 5, accuracy=[(8, 0.25), (10, 0.75)], first_step=8)
    (_, at_8), (_, at_10) = ends(seen[ACCURACY])
    (_, first), (_, last) = ends(seen[DOTS])
    assert abs(at_8 - first) < 20
    assert abs((at_10 - at_8) - (last - first) / 2) < 20


def test_negative_rewards_are_in_the_picture(tmp_path: Path) -> None:
    dots = draw(tmp_path, [-3.0, 0.5])[DOTS]
    assert height(dots) > 250


@pytest.mark.parametrize("rewards", [[], [0.0], [0.5]])
def test_short_runs_have_a_picture(tmp_path: Path, rewards: list[float]) -> None:
    assert (len(draw(tmp_path, rewards)[DOTS]) > 0) is bool(rewards)


@pytest.mark.parametrize("title", ["run: $x^2", r"run: $\frac$", "run: a_b {}", "x" * 300])
def test_any_name_may_be_in_the_title(tmp_path: Path, title: str) -> None:
    assert len(draw(tmp_path, [0.5], title=title)[DOTS]) > 0
