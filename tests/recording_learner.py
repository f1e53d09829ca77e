"""A learner rank that lets a test see its gradient, and start over with other settings."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from actors.learner import LearnerActor
from actors.node import LOOPBACK, free_port
from actors.protocol import LearnerSpec, SyncRendezvous
from real_ray.errors import SyncError

Gradients = dict[str, np.ndarray]


@dataclass(frozen=True)
class Gathered:
    """What a rank had of the weights of a sync, which it gathered in buckets."""

    shapes: dict[str, tuple[int, ...]]  # in order
    checksums: dict[str, int]
    most_bytes: int  # of partitioned parameters that were whole at a time


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

    def gathered(self, bucket_bytes: int) -> Gathered:
        """The weights that a sync would send."""
        from actors.buckets import checksum
        from actors.weight_source import DeepSpeedWeightSource

        model = self._engine.module.model
        partitioned = [p for p in model.parameters() if hasattr(p, "ds_shape") and not p.ds_persist]
        found = Gathered({}, {}, 0)
        for name, tensor in DeepSpeedWeightSource(
            model, self._dtype, bucket_bytes=bucket_bytes, copies=False
        ):
            found.shapes[name] = tuple(tensor.shape)
            found.checksums[name] = checksum(tensor.contiguous())
            now = sum(p.numel() * p.element_size() for p in partitioned)
            found = replace(found, most_bytes=max(found.most_bytes, now))
        return found

    def sync_with_itself(self, bucket_bytes: int, fails_at: str) -> dict[str, int] | str:
        """Send the weights to a receiver in the process of rank 0; return checksums or the error.

        Args:
            fails_at: name of a tensor that is refused, or "start", or empty.
        """
        from receiving_process import OwnReceiver

        from actors.full_sync import FullSender

        client: Any = OwnReceiver(fails_at)
        sender = FullSender(
            self._engine.module.model,
            client=client,
            dtype=self._dtype,
            rendezvous=SyncRendezvous(
                backend="gloo",
                master_address=LOOPBACK,
                master_port=free_port(LOOPBACK),
                num_generators=1,
                workers_per_generator=1,
                timeout_s=60.0,
                bucket_bytes=bucket_bytes,
            ),
            rank=self._spec.rank,
        )
        try:
            sent = sender.send_weights()
        except SyncError as error:
            return str(error)
        finally:
            sender.close()
        assert sent.checksums == client.weights()[1]
        return dict(sent.checksums)
