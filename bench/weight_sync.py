"""Measure weight syncs on a CPU: GB/s of the transfer, and where the time of a whole sync goes.

The transfer goes to 1, 2 and 4 receivers that load nothing, in turns with a plain gloo broadcast
of buckets of the same size and with a copy in memory. A whole sync goes to one vLLM engine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from arguments import at_least
from receivers import RawGroup, Receivers, broadcast
from report import Report, Row
from rich.console import Console

from actors.buckets import num_bytes, split, total_bytes
from actors.gloo_sender import GlooTrainerInitInfo, GlooTrainerWeightTransferEngine
from actors.node import LOOPBACK, free_port
from actors.weight_source import DeepSpeedWeightSource, output_layer_name
from real_ray.demo_model import obtain

_TARGET = 0.8  # of the plain broadcast


def main() -> None:
    options = _parse()
    os.environ |= {
        "DS_ACCELERATOR": "cpu",
        "GLOO_SOCKET_IFNAME": "lo",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_HOST_IP": LOOPBACK,
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }
    torch.set_num_threads(1)
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    options.model = options.model or obtain()
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16)
    console = Console(width=None if Console().is_terminal else 200)
    rows = [
        _transfer(model, count, options, shared_memory=shared_memory)
        for count in options.receivers
        for shared_memory in (True, False)
    ]
    reports = [
        Report(name="transfer", title="Transfer alone, GB/s: median of the rounds", rows=rows)
    ]
    console.print(reports[0].table())
    worst = min(row["ours/plain"] for row in rows if row["over"] == "shared memory")
    console.print(f"transfer / plain broadcast: worst {worst:.3f}, target at least {_TARGET}")
    if not options.no_engine:
        rows = asyncio.run(_whole_syncs(model, options))
        reports.append(
            Report(name="sync", title="Whole sync to one engine, milliseconds by part", rows=rows)
        )
        console.print(reports[1].table())
    if options.json:
        found = {report.name: report.rows for report in reports}
        options.json.write_text(json.dumps({"target": _TARGET, "reached": worst} | found, indent=1))


def _transfer(model: Any, count: int, options: argparse.Namespace, *, shared_memory: bool) -> Row:
    """All three in turns, after one round to warm up."""
    with Receivers(count) as receivers:
        sender = _connect(model, receivers, 1 + count, options, shared_memory=shared_memory)
        sizes = _sizes(sender)
        group = RawGroup(port=free_port(LOOPBACK), world_size=1 + count)
        receivers.join_raw(group)
        raw = group.join(0)
        receivers.answers()
        buffers = [torch.zeros(max(sizes), dtype=torch.uint8) for _ in range(2)]
        plain, ours, copy, gather = [], [], [], []
        for _ in range(options.rounds + 1):
            receivers.tell("raw", [sizes] * count)
            began = time.perf_counter()
            for index, size in enumerate(sizes):
                broadcast(raw, buffers[index % 2][:size])
            receivers.answers()
            plain.append(time.perf_counter() - began)
            sender.send_weights()
            ours.append(sum(sender.seconds[part] for part in ("gather", "transfer", "load")))
            gather.append(sender.seconds["gather"])
            began = time.perf_counter()
            for size in sizes:
                buffers[0][:size].copy_(buffers[1][:size])
            copy.append(time.perf_counter() - began)
        sender.shutdown()
    gigabytes = sum(sizes) / 1e9
    return {
        "receivers": count,
        "over": "shared memory" if shared_memory else "gloo",
        "GB": gigabytes,
        "buckets": len(sizes),
        "ours": gigabytes / median(ours[1:]),
        "plain_broadcast": gigabytes / median(plain[1:]),
        "memcpy": gigabytes / median(copy[1:]),
        "ours/plain": median(p / o for p, o in zip(plain[1:], ours[1:], strict=True)),
        "gather_ms": 1e3 * median(gather[1:]),
        "ours_ms": 1e3 * median(ours[1:]),
    }


async def _whole_syncs(model: Any, options: argparse.Namespace) -> list[Row]:
    from actors.generator import GeneratorActor
    from actors.protocol import EngineSpec

    generator = GeneratorActor(
        EngineSpec(
            name="generator-0",
            model=str(options.model),
            trust_remote_code=False,
            device="cpu",
            dtype="bfloat16",
            seed=0,
            max_model_length=512,
            tensor_parallel_size=1,
            gpu_memory_utilization=0.5,
            kv_cache_bytes=2**28,
            num_threads=1,
            enforce_eager=True,
            in_flight_updates=True,
            recompute_kv=True,
            sync_backend="gloo",
            max_lora_rank=0,
            lora_target_modules=(),
        )
    )
    await generator.start()
    try:
        client = _Client(generator, asyncio.get_running_loop())
        sender = await asyncio.to_thread(_connect, model, client, 2, options)
        rows = []
        tokens = torch.arange(100, 164).numpy()
        for round_ in range(options.rounds + 1):
            client.version = round_
            await generator.pause()
            began = time.perf_counter()
            await asyncio.to_thread(sender.send_weights)
            sent = time.perf_counter()
            await generator.resume()
            await generator.weights()
            held = time.perf_counter()
            await generator.probe(tokens)
            probed = time.perf_counter()
            (engine,) = await generator._engine.collective_rpc("update_seconds")
            parts = {f"{k}_ms": 1e3 * v for k, v in sender.seconds.items()}
            inside = {f"engine:_{k}_ms": 1e3 * v for k, v in engine.items()}
            rows.append(
                {"round": round_, "total_ms": 1e3 * (sent - began)}
                | parts
                | inside
                | {"weights_ms": 1e3 * (held - sent), "probe_ms": 1e3 * (probed - held)}
            )
        return rows
    finally:
        await generator.shutdown()


class _Client:
    """vLLM's weight-sync client for a generator in this process, from a thread of its own."""

    def __init__(self, generator: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._generator = generator
        self._loop = loop
        self.version = 0

    def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
        self._run(self._generator.init_weight_transfer_engine(info))

    def start_weight_update(self) -> None:
        self._run(self._generator.start_weight_update())

    def update_weights(self, info: Any) -> None:
        self._run(self._generator.update_weights(info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._run(self._generator.finish_weight_update(self.version))

    def _run(self, call: Any) -> None:
        asyncio.run_coroutine_threadsafe(call, self._loop).result()


def _connect(
    model: Any,
    client: Any,
    world_size: int,
    options: argparse.Namespace,
    *,
    shared_memory: bool = True,
) -> GlooTrainerWeightTransferEngine:
    bucket_bytes = options.bucket_mib * 2**20
    info = GlooTrainerInitInfo(
        LOOPBACK,
        free_port(LOOPBACK),
        world_size,
        bucket_bytes=bucket_bytes,
        # Receivers without a model have no output layer.
        output_layer="" if isinstance(client, Receivers) else output_layer_name(model),
        shared_memory=shared_memory,
        rank=0,
    )
    source = DeepSpeedWeightSource(model, torch.bfloat16, bucket_bytes=bucket_bytes, copies=False)
    return GlooTrainerWeightTransferEngine.trainer_init(info, client=client, source=source)


def _sizes(sender: GlooTrainerWeightTransferEngine) -> list[int]:
    """Bytes of each bucket."""
    assert sender.source is not None
    metadata = sender.source.metadata()
    parts = split([num_bytes(meta) for meta in metadata], sender._info.bucket_bytes)
    return [total_bytes(metadata[part]) for part in parts]


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, help="Hugging Face directory (default: the demo's)")
    parser.add_argument("--rounds", type=at_least(1), default=5, help="of each (default: 5)")
    parser.add_argument("--bucket-mib", type=at_least(1), default=16, help="(default: 16)")
    parser.add_argument(
        "--receivers", type=at_least(1), nargs="+", default=[1, 2, 4], help="(default: 1 2 4)"
    )
    parser.add_argument("--no-engine", action="store_true", help="the transfer alone")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there")
    return parser.parse_args()


if __name__ == "__main__":
    main()
