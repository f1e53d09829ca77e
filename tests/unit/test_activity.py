"""What counts as progress, and since when."""

from __future__ import annotations

from dataclasses import astuple

from real_ray.activity import Activity


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def rows(activity: Activity) -> list[tuple[str, str, float]]:
    return [astuple(row) for row in activity.rows()]


def test_a_change_is_progress_and_the_same_text_is_not() -> None:
    clock = Clock()
    activity = Activity(clock)
    clock.now = 103
    assert activity.seconds_since_progress() == 3
    activity.set("learner", "trains step 1")
    clock.now = 110
    activity.set("learner", "trains step 1")
    assert rows(activity) == [("learner", "trains step 1", 7)]
    assert activity.seconds_since_progress() == 7
    activity.set("learner", "trains step 2")
    assert rows(activity) == [("learner", "trains step 2", 0)]
    assert activity.seconds_since_progress() == 0


def test_each_part_has_its_own_time_and_the_longest_is_first() -> None:
    clock = Clock()
    activity = Activity(clock)
    activity.set("buffer", "waits for 3 groups")
    activity.set("generator-0", "1 group")
    clock.now = 105
    activity.set("buffer", "waits for 2 groups")
    activity.set("sync", "waits for the buffer")
    clock.now = 106
    assert rows(activity) == [
        ("generator-0", "1 group", 6),
        ("buffer", "waits for 2 groups", 1),
        ("sync", "waits for the buffer", 1),
    ]
    assert activity.seconds_since_progress() == 1


def test_the_end_of_a_part_is_progress_once() -> None:
    clock = Clock()
    activity = Activity(clock)
    activity.set("evaluation", "of version 2")
    clock.now = 110
    activity.remove("evaluation")
    assert activity.seconds_since_progress() == 0
    assert not activity.rows()
    clock.now = 115
    activity.remove("evaluation")
    assert activity.seconds_since_progress() == 5
    activity.set("evaluation", "of version 2")
    assert rows(activity) == [("evaluation", "of version 2", 0)]
