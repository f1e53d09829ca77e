"""What the sending side of a weight sync asks of the generators."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import RayError

from actors.protocol import AdapterUpdate
from actors.transfer_errors import BROKE_OFF
from real_ray.errors import SyncError

_JOIN = "join the weight-transfer group"
_GRACE_S = 5.0  # for others to fail as well, after one that somebody else has made fail


class GeneratorClient:
    """vLLM's `VLLMWeightSyncClient` protocol over Ray, for all generators at once.

    vLLM's own Ray client gives every engine the same ranks and waits without a deadline.

    Args:
        generators: Ray handles by name, in the order of their ranks.
        timeout_s: for each call.
    """

    def __init__(
        self, generators: Mapping[str, Any], *, workers_per_generator: int, timeout_s: float
    ) -> None:
        self._generators = dict(generators)
        self._workers_per_generator = workers_per_generator
        self._timeout_s = timeout_s
        self.policy_version = 0  # label of the next update
        # vLLM may call from a thread of its own and raise another error than it got there.
        self.error: SyncError | None = None  # the last one since `reset`
        self.waits_for: tuple[str, ...] = ()  # generators, while they are asked for something

    def reset(self) -> None:
        """Forget the last error, before another operation."""
        self.error = None

    def give_up(self, timeout_s: float) -> None:
        """Blame those who are waited for, if nobody is known to have failed."""
        late = self.waits_for
        self.error = self.error or SyncError(
            f"weight sync of version {self.policy_version}: {', '.join(late) or 'the learner'} did "
            f"not finish within {timeout_s:g} s (sync.timeout_s)",
            late,
        )

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        first = init_info["rank_offset"]
        self._wait(
            _JOIN,
            {
                name: generator.init_weight_transfer_engine.remote(
                    {**init_info, "rank_offset": first + index * self._workers_per_generator}
                )
                for index, (name, generator) in enumerate(self._generators.items())
            },
        )

    def start_weight_update(self) -> None:
        self._ask("begin the update", "start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        self._ask("receive the weights", "update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        version = self.policy_version if weight_version is None else int(weight_version)
        self._ask("finish the update", "finish_weight_update", version)

    def load_adapter(self, update: AdapterUpdate) -> None:
        """Bring a LoRA adapter into all generators, which must be paused."""
        self._ask("load the adapter", "load_adapter", ray.put(update))

    def _ask(self, what: str, method: str, *arguments: Any) -> None:
        self._wait(
            what,
            {
                name: getattr(generator, method).remote(*arguments)
                for name, generator in self._generators.items()
            },
        )

    def _wait(self, what: str, replies: Mapping[str, Any]) -> None:
        """Wait for all, or until it is known who is to blame."""
        waiting = {reply: name for name, reply in replies.items()}
        failed: dict[str, BaseException] = {}
        deadline = time.monotonic() + self._timeout_s
        while waiting:
            self.waits_for = tuple(n for n in replies if n in waiting.values())
            left = max(deadline - time.monotonic(), 0.0)
            done, _ = ray.wait(list(waiting), num_returns=1, timeout=left)
            if not done:
                break
            name = waiting.pop(done[0])
            try:
                ray.get(done[0])
            except RayError as error:
                failed[name] = cause = getattr(error, "cause", None) or error
                if BROKE_OFF not in str(cause):
                    break  # others may wait for it, and the sender for this answer
                deadline = min(deadline, time.monotonic() + _GRACE_S)
        self.waits_for = ()
        if failed or waiting:
            late = [n for n in replies if n in waiting.values()]
            self.error = self._error(what, failed, late=late)
            raise self.error

    def _error(self, what: str, failed: dict[str, BaseException], late: list[str]) -> SyncError:
        """Blames those with an error of their own, else those who are late.

        The others have failed or are late because of them.
        """
        where = "weight sync"
        if what != _JOIN:  # which is for all versions to come
            where += f" of version {self.policy_version}"
        guilty = {name: e for name, e in failed.items() if BROKE_OFF not in str(e)}
        if guilty:
            errors = "; ".join(
                f"{name} could not {what}: {type(error).__name__}: {error}"
                for name, error in guilty.items()
            )
            return SyncError(f"{where}: {errors}", tuple(guilty))
        if late:
            return SyncError(
                f"{where}: {', '.join(late)} did not {what} within {self._timeout_s:g} s "
                "(sync.timeout_s)",
                tuple(late),
            )
        name, error = next(iter(failed.items()))
        return SyncError(f"{where}: no generator is to blame, but {name}: {error}")
