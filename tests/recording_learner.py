"""A learner rank that lets a test see its gradient."""

from __future__ import annotations

import numpy as np

from actors.learner import LearnerActor

Gradients = dict[str, np.ndarray]


class RecordingLearner(LearnerActor):
    """Keeps the full gradient of each step, as DeepSpeed holds it when the step begins."""

    def start(self, master_address: str, master_port: int) -> None:
        from deepspeed.utils import safe_get_full_grad

        super().start(master_address, master_port)
        step = self._engine.step

        def recording_step() -> None:
            self._gradients = {
                name: safe_get_full_grad(parameter).float().cpu().numpy()
                for name, parameter in self._engine.module.named_parameters()
            }
            step()

        self._engine.step = recording_step

    def gradients(self) -> Gradients:
        return self._gradients
