"""Restarts: how often the learner was started again without getting anywhere."""

from __future__ import annotations

from real_ray.errors import LearnerLostError, RealRayError


class Restarts:
    """Counts losses of the learner since the last step that it had not reached before.

    Args:
        most: `learner.max_restarts`.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.in_a_row = 0
        self._furthest = -1  # step

    def count(self, error: RealRayError, *, reached: int) -> None:
        """Count a loss.

        Args:
            reached: the last step that was finished.

        Raises:
            LearnerLostError: it was one too many.
        """
        if reached > self._furthest:
            self._furthest, self.in_a_row = reached, 0
        self.in_a_row += 1
        if self.in_a_row > self.most:
            raise LearnerLostError(
                f"{error}; the learner was started again {self.most} times since it had finished "
                f"step {self._furthest} (learner.max_restarts)"
            ) from error
