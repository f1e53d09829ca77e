"""What the sending side of a weight sync asks of the generators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from actors.protocol import AdapterUpdate
from real_ray.errors import SyncError


class GeneratorClient:
    """vLLM's `VLLMWeightSyncClient` protocol over Ray, for all generators at once.

    vLLM's own Ray client gives every engine the same ranks and waits without a deadline.
    """

    def __init__(
        self, generators: Sequence[Any], *, workers_per_generator: int, timeout_s: float
    ) -> None:
        self._generators = list(generators)
        self._workers_per_generator = workers_per_generator
        self._timeout_s = timeout_s
        self.policy_version = 0  # label of the next update

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        first = init_info["rank_offset"]
        self._wait(
            "join the weight-transfer group",
            [
                g.init_weight_transfer_engine.remote(
                    {**init_info, "rank_offset": first + index * self._workers_per_generator}
                )
                for index, g in enumerate(self._generators)
            ],
        )

    def start_weight_update(self) -> None:
        self._wait("begin the update", [g.start_weight_update.remote() for g in self._generators])

    def update_weights(self, update_info: Any) -> None:
        self._wait(
            "receive the weights", [g.update_weights.remote(update_info) for g in self._generators]
        )

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        version = self.policy_version if weight_version is None else int(weight_version)
        self._wait(
            "finish the update",
            [g.finish_weight_update.remote(version) for g in self._generators],
        )

    def load_adapter(self, update: AdapterUpdate) -> None:
        """Bring a LoRA adapter into all generators, which must be paused."""
        shared = ray.put(update)
        self._wait("load the adapter", [g.load_adapter.remote(shared) for g in self._generators])

    def _wait(self, what: str, replies: list[Any]) -> None:
        _, late = ray.wait(replies, num_returns=len(replies), timeout=self._timeout_s)
        if late:
            names = [f"generator-{replies.index(reply)}" for reply in late]
            raise SyncError(
                f"weight sync of version {self.policy_version}: {', '.join(names)} did not {what} "
                f"within {self._timeout_s:g} s (sync.timeout_s)"
            )
        for index, answer in enumerate(replies):
            try:
                ray.get(answer)
            except RayError as error:
                cause = getattr(error, "cause", None) or error
                raise SyncError(
                    f"weight sync of version {self.policy_version}: generator-{index} could not "
                    f"{what}: {type(cause).__name__}: {cause}"
                ) from error
