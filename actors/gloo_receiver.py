"""The receiving side of the weight transfer over gloo, in each worker process of a generator."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from vllm.distributed.weight_transfer import WeightTransferEngine
from vllm.distributed.weight_transfer.base import ParamMeta

from actors.buckets import Buffers, checksum, num_bytes, split, total_bytes, views
from actors.gloo_group import GlooInitInfo, Wire, join_group
from actors.gloo_sender import GlooUpdateInfo
from actors.output_layer import OutputLayerCheck, refresh_output_layers
from actors.reload import begin_reload, end_reload, parameter_names, unfinished_layers
from actors.transfer_errors import BROADCAST_SHARE, TransferBrokenError


class GlooWeightTransferEngine(WeightTransferEngine[GlooInitInfo, GlooUpdateInfo]):
    """Receives buckets and loads from views of them."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo

    _wire: Wire | None = None
    _info: GlooInitInfo | None = None
    _buffers: Buffers | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Of the last update.
        self.checksums: dict[str, int] = {}
        self.problems: list[str] = []
        self.seconds: dict[str, float] = {}
        self._output_layer = OutputLayerCheck("")
        self._expected: set[str] = set()

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        self.shutdown()
        worker = (
            self.parallel_config.data_parallel_index * self.parallel_config.world_size
            + self.parallel_config.rank
        )
        self._wire = join_group(init_info, rank=init_info.rank_offset + worker)
        self._info = init_info
        # Kept from update to update: the first write to new memory takes as long as receiving it.
        self._buffers = Buffers(init_info.bucket_bytes)

    def start_weight_update(self) -> None:
        self.checksums, self.problems = {}, []
        self.seconds = {"transfer": 0.0, "load": 0.0, "check": 0.0}
        self._expected = parameter_names(self.model, self.model_config)
        begin_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The base class synchronises the accelerator afterwards; there is none.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        """Receive and load all tensors of an update.

        Raises:
            TransferBrokenError: they do not come.
            ValueError: a tensor does not fit the model.
        """
        try:
            loaded = self._load(update_info)
        except BaseException:
            self.shutdown()  # the sender need not wait for this member any more
            raise
        if loaded is not None:
            self.problems += [f"not loaded: {name}" for name in sorted(self._expected - loaded)]
        self.problems += [
            f"not loaded in full: {name}" for name in unfinished_layers(self.model) if loaded
        ]

    def _load(self, update_info: GlooUpdateInfo) -> set[str] | None:
        self._output_layer = OutputLayerCheck(update_info.output_layer)
        metadata, last = update_info.metadata(), "none"

        def arriving() -> Iterator[tuple[str, Tensor]]:
            nonlocal last
            for meta, tensor in self._received(metadata):
                last = f"{meta.name} {tuple(meta.shape)} {meta.dtype}"
                began = time.monotonic()
                yield meta.name, tensor
                self.seconds["load"] += time.monotonic() - began

        try:
            loaded: set[str] | None = self.model.load_weights(arriving())
        except TransferBrokenError:
            raise
        except Exception as error:
            raise ValueError(
                f"the tensor {last}, or one before it, does not fit the model: "
                f"{type(error).__name__} {error}"
            ) from error
        return loaded

    def _received(self, metadata: list[ParamMeta]) -> Iterator[tuple[ParamMeta, Tensor]]:
        """Each tensor, inside of its bucket."""
        assert self._wire is not None, "init_weight_transfer_engine comes first"
        assert self._info is not None
        assert self._buffers is not None
        deadline = time.monotonic() + BROADCAST_SHARE * self._info.timeout_s
        parts = split([num_bytes(meta) for meta in metadata], self._info.bucket_bytes)
        buckets = [metadata[part] for part in parts]
        sizes = [total_bytes(bucket) for bucket in buckets]
        arriving = self._wire.receive(sizes, self._buffers, deadline)
        for bucket in buckets:
            began = time.monotonic()
            buffer = next(arriving)
            self.seconds["transfer"] += time.monotonic() - began
            for meta, tensor in zip(bucket, views(buffer, bucket), strict=True):
                began = time.monotonic()
                self.checksums[meta.name] = checksum(tensor)
                self._output_layer.note(meta.name, tensor)
                self.seconds["check"] += time.monotonic() - began
                yield meta, tensor
            del buffer, tensor  # or memory of this bucket would be kept for one more

    def finish_weight_update(self) -> None:
        began = time.monotonic()
        end_reload(self.model, self.model_config)
        self.refresh_output_layers()
        finished = time.monotonic()
        self.problems += self._output_layer.problems(self.model)
        self.seconds["finish"] = finished - began
        self.seconds["check"] += time.monotonic() - finished

    def refresh_output_layers(self) -> None:
        """Let the output layer see what was loaded."""
        refresh_output_layers(self.model)

    def shutdown(self) -> None:
        if self._wire is not None:
            self._wire.close()
            self._wire = self._buffers = None
