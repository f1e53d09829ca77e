"""A learner rank that lets a test see its gradient, and start over with other settings."""

from __future__ import annotations

import numpy as np

from actors.learner import LearnerActor
from actors.protocol import LearnerSpec

Gradients = dict[str, np.ndarray]


class RecordingLearner(LearnerActor):
    """Keeps the full gradient of each step, as DeepSpeed holds it when the step begins."""

    def restart(self, spec: LearnerSpec, checkpoint: str | None) -> int | None:
        """Begin again in the same process group, which saves the start of a process."""
        LearnerActor.__init__(self, spec)
        return self._build(checkpoint)

    def _build(self, checkpoint: str | None = None) -> int | None:
        from deepspeed.utils import safe_get_full_grad

        version = super()._build(checkpoint)
        self._gradients: list[Gradients] = []
        step = self._engine.step

        def recording_step() -> None:
            self._gradients.append(
                {
                    name: safe_get_full_grad(parameter).float().cpu().numpy()
                    for name, parameter in self._engine.module.model.named_parameters()
                    if parameter.requires_grad
                }
            )
            step()

        self._engine.step = recording_step
        return version

    def parameters(self) -> dict[str, np.ndarray]:
        """Full values by Hugging Face name."""
        import deepspeed

        found = {}
        for name, parameter in self._engine.module.model.named_parameters():
            partitioned = hasattr(parameter, "ds_shape")
            with deepspeed.zero.GatheredParameters([parameter], enabled=partitioned):
                found[name] = parameter.detach().float().cpu().numpy().copy()
        return found

    def gradients(self) -> list[Gradients]:
        """Of each optimiser step since the start."""
        return self._gradients
