"""EngineWeights: how the weights of an engine are replaced while it runs."""

from __future__ import annotations

import asyncio
import hashlib
import json
import tempfile
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from actors.protocol import AdapterUpdate
from real_ray.errors import ActorDiedError, SyncError
from real_ray.weights import HeldWeights

_ADAPTER_ID = 1  # the same for all versions


class EngineWeights:
    """Updates of full weights or of a LoRA adapter, and what the last one has brought.

    Args:
        call: calls a method of the engine by its name; ActorDiedError where the engine is gone.
        engine_checksums: let vLLM make one of all weights where a sync leaves no others.
    """

    def __init__(
        self,
        call: Callable[..., Coroutine[Any, Any, Any]],
        *,
        name: str,
        engine_checksums: bool,
    ) -> None:
        self._call = call
        self._name = name
        self._engine_checksums = engine_checksums
        self._num_tensors = 0  # of the last update
        self._update_under_way = False
        self._broke_off = False  # the last update did
        self.adapter: Any = None  # vLLM's LoRARequest that every request carries
        self._adapter_checksums: dict[str, int] = {}

    async def join(self, init_info: dict[str, Any]) -> None:
        """Join a weight-transfer group; an earlier one is left first."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self.abandon()
        await self._call("shutdown_weight_transfer_engine")
        await self._call("init_weight_transfer_engine", WeightTransferInitRequest(init_info))

    async def start(self) -> None:
        """Begin an update; one that was interrupted is abandoned first."""
        await self.abandon()
        self._update_under_way = True
        self._num_tensors = 0
        await self._call("start_weight_update")

    async def update(self, update_info: dict[str, Any]) -> None:
        """Receive and load tensors. After an error the engine can run, on weights of two versions.

        `held` tells so until the next complete update.
        """
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        try:
            await self._call("update_weights", WeightTransferUpdateRequest(update_info))
        except ActorDiedError:
            raise
        except Exception:
            await self.abandon()
            raise
        self._num_tensors += len(update_info["names"])

    async def finish(self, policy_version: int) -> None:
        await self._call("finish_weight_update", weight_version=str(policy_version))
        self._update_under_way = self._broke_off = False

    async def abandon(self) -> None:
        if self._update_under_way:
            await self._call("collective_rpc", "abandon_weight_update")
            self._update_under_way, self._broke_off = False, True

    async def load_adapter(self, update: AdapterUpdate) -> None:
        """Replace the LoRA adapter; needs a paused engine, whose requests go on under the new one.

        Raises:
            SyncError: vLLM did not take it.
        """
        from vllm.lora.request import LoRARequest

        with tempfile.TemporaryDirectory(prefix="real-ray-adapter-") as directory:
            await asyncio.to_thread(_write_files, Path(directory), update.files)
            # Running requests refer to the id. The path is part of the key of cached prefixes.
            adapter = LoRARequest("policy", _ADAPTER_ID, directory)
            await self._call(
                "add_lora", LoRARequest("policy", _ADAPTER_ID, directory, load_inplace=True)
            )
        unused, *_ = await self._call(
            "collective_rpc", "unused_adapter_layers", args=(_ADAPTER_ID,)
        )
        if unused:
            raise SyncError(
                f"{self._name}: vLLM has no place for the adapter of {', '.join(unused)}: set "
                "learner.lora_sync: merged, or leave them out of learner.lora_target_modules"
            )
        # Requests must not carry `load_inplace`, or each step would read the files again.
        self.adapter = adapter
        self._num_tensors = update.num_tensors
        self._adapter_checksums = _checksums(update.files)
        # Not finish_weight_update(): that ends a transfer of full weights and drops all adapters.
        await self._call("update_weight_version", str(update.policy_version))

    async def held(self) -> HeldWeights:
        """What this generator says it holds: version, tensors, and what is wrong with them."""
        version = int(await self._call("get_weight_version"))
        problems = ["an update broke off: weights of two versions"] if self._broke_off else []
        checksums = self._adapter_checksums
        if not checksums:
            workers = await self._call("collective_rpc", "received_weights")
            checksums = workers[0][0]
            for index, (sums, found) in enumerate(workers):
                where = f"worker {index}: " if len(workers) > 1 else ""
                problems += [where + problem for problem in found]
                if sums != checksums:
                    problems.append(f"worker {index} received other weights than worker 0")
        return HeldWeights(
            policy_version=version,
            num_tensors=self._num_tensors,
            checksums=checksums,
            # vLLM reads all weights for it, so it is for back ends that have nothing better.
            engine_checksum=await self._engine_checksum()
            if self._engine_checksums and not checksums
            else "",
            problems=tuple(problems),
        )

    async def _engine_checksum(self) -> str:
        """One for all tensors of all workers, as the engine has them in memory."""
        workers = await self._call("compute_weight_checksums")
        return hashlib.sha256(json.dumps(workers, sort_keys=True).encode()).hexdigest()


def _checksums(files: Mapping[str, bytes]) -> dict[str, int]:
    """Of the tensors in an adapter's files."""
    from safetensors.torch import load

    from actors.buckets import checksum

    return {
        name: checksum(tensor)
        for file, content in files.items()
        if file.endswith(".safetensors")
        for name, tensor in load(content).items()
    }


def _write_files(directory: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        (directory / name).write_bytes(content)
