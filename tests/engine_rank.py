"""One rank of a DeepSpeed engine around a tiny model, as the learner builds it."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from driver_states import driver_state

from actors.checkpoint import load, save
from actors.checkpoint_files import CheckpointFacts
from actors.universal import deepspeed_checkpoint_config
from actors.zero import StepOutcome, optimizer_step, poison_unless_finite
from real_ray.policy.lora import add_lora

State = dict[str, np.ndarray]

_LR = 1e-2
_LORA_RANK, _LORA_ALPHA, _LORA_TARGETS = 4, 8.0, ("q_proj", "down_proj")


class Wrapper(torch.nn.Module):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> Any:
        return self.model(input_ids=input_ids, use_cache=False)


class _Unwritable:
    def save_pretrained(self, _directory: Path) -> None:
        raise OSError("no space left")


class EngineRank:
    """Builds one engine after another; all ranks are called together."""

    def __init__(self, rank: int, world_size: int, port: int) -> None:
        os.environ |= {
            "DS_ACCELERATOR": "cpu",
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        torch.set_num_threads(1)
        import deepspeed

        dist.init_process_group("gloo", rank=rank, world_size=world_size)
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed()
        self._rank, self._world_size = rank, world_size

    def build(
        self,
        model: Path,
        *,
        zero_stage: int,
        dtype: str = "float32",
        offload: bool = False,
        lora: bool = False,
        checkpoint: Path | None = None,
    ) -> int | None:
        """Start a fresh engine; load the checkpoint if there is one and return its version."""
        import deepspeed
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.manual_seed(0)
        hf = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
        if lora:
            add_lora(hf, rank=_LORA_RANK, alpha=_LORA_ALPHA, target_modules=_LORA_TARGETS, seed=0)
            for name, parameter in hf.named_parameters():
                if "lora_B" in name:  # zeros have no gradient for A
                    torch.nn.init.normal_(parameter, std=0.1)
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._facts = CheckpointFacts(
            policy_version=0,
            world_size=self._world_size,
            zero_stage=zero_stage,
            dtype=dtype,
            base_model=str(model),
            trust_remote_code=False,
            lora_rank=_LORA_RANK if lora else 0,
            lora_alpha=_LORA_ALPHA if lora else 0.0,
            lora_target_modules=_LORA_TARGETS if lora else (),
        )
        trainable = [p for p in hf.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in trainable if p.ndim > 1], "weight_decay": 0.1},
                {"params": [p for p in trainable if p.ndim == 1], "weight_decay": 0.0},
            ],
            lr=_LR,
            fused=True,
        )
        zero: dict[str, Any] = {"stage": zero_stage}
        if offload:
            zero["offload_optimizer"] = {"device": "cpu"}
            if zero_stage == 3:
                zero["offload_param"] = {"device": "cpu"}
        settings = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 0.5,
            "bf16": {"enabled": dtype == "bfloat16"},
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 2**31,
        }
        if checkpoint is not None:
            settings |= deepspeed_checkpoint_config(checkpoint, self._world_size)
        self._engine, _, _, _ = deepspeed.initialize(
            model=Wrapper(hf),
            optimizer=optimizer,
            lr_scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda s: 1 / (s + 1)),
            config=settings,
        )
        if checkpoint is not None:
            return load(self._engine, checkpoint, facts=self._facts).policy_version
        return None

    def train(self, steps: Sequence[int], spoil: str = "") -> list[StepOutcome]:
        """A step of two micro-batches of two rows for each seed; the same rows for any ranks.

        Args:
            steps: seeds of the data, negative for a step that is spoiled.
            spoil: "gradient" or "loss": what the spoiled step finds on the last rank, in the first
                micro-batch.
        """
        outcomes = []
        for seed in steps:
            rows = torch.from_numpy(np.random.default_rng(abs(seed)).integers(4, 90, (4, 12)))
            for index, pair in enumerate(rows.split(2)):
                share = pair.chunk(self._world_size)[self._rank]
                self._engine.set_gradient_accumulation_boundary(index == 1)
                logprobs = self._engine(share).logits.float().log_softmax(-1)[:, :-1]
                loss = -logprobs.gather(-1, share[:, 1:, None]).mean() / 2
                if seed < 0 and index == 0 and self._rank == self._world_size - 1:
                    # An infinite constant is a loss that is not finite with a gradient that is.
                    loss = loss * math.inf if spoil == "gradient" else loss + math.inf
                self._engine.backward(poison_unless_finite(loss), scale_wrt_gas=False)
            outcomes.append(optimizer_step(self._engine))
        return outcomes

    def save(
        self,
        directory: Path,
        policy_version: int,
        *,
        fails: bool = False,
        save_total_limit: int | None = None,
    ) -> None:
        """Args: fails: the tokenizer cannot be written, when the rest of the checkpoint was."""
        save(
            self._engine,
            directory,
            facts=replace(self._facts, policy_version=policy_version),
            tokenizer=_Unwritable() if fails else self._tokenizer,
            driver=driver_state(policy_version),
            save_total_limit=save_total_limit,
        )

    def dropout(self, calls: int) -> list[np.ndarray]:
        """What dropout leaves of ones; a rank draws more the higher its number."""
        ones = torch.ones(16 * (self._rank + 1))
        return [torch.nn.functional.dropout(ones, 0.5).numpy() for _ in range(calls)]

    def state(self) -> State:
        """Full weights and master weights; this rank's moments; step counts and rates."""
        import deepspeed
        from deepspeed.utils import safe_get_full_fp32_param

        engine = self._engine
        inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
        state: State = {}
        for name, parameter in engine.module.named_parameters():
            with deepspeed.zero.GatheredParameters(
                [parameter], enabled=hasattr(parameter, "ds_shape")
            ):
                state[f"{name}/weight"] = parameter.detach().float().numpy().copy()
            if parameter.requires_grad and self._facts.zero_stage > 0:
                state[f"{name}/master"] = safe_get_full_fp32_param(parameter).numpy().copy()
        for index, moments in enumerate(inner.state.values()):  # this rank's share
            state |= {f"{index}/{key}": value.numpy().copy() for key, value in moments.items()}
        steps = {float(moments["step"]) for moments in inner.state.values()}
        state["steps"] = np.array(sorted(steps))
        for key in ("lr", "weight_decay"):
            state[key] = np.array([group[key] for group in inner.param_groups])
        return state

    def hugging_face_weights(self) -> State:
        """What generators would get, in float32; all ranks gather together."""
        from actors.weight_source import full_parameters

        dtype = getattr(torch, self._facts.dtype)
        return {
            name: tensor.float().numpy()
            for name, tensor in full_parameters(self._engine.module.model, dtype)
        }

    def adapter(self) -> State:
        """Full values of the adapter, under their names in a file of peft, in float32."""
        from actors.weight_source import gathered
        from real_ray.policy.lora import adapter_parameters

        state: State = {}
        for name, parameter in adapter_parameters(self._engine.module.model).items():
            with gathered([parameter]):
                state[name] = parameter.detach().float().numpy().copy()
        return state

    def logprobs(self, token_ids: np.ndarray) -> np.ndarray:
        """Log-probs of each token of a sequence but the first: [T - 1]."""
        ids = torch.from_numpy(token_ids.astype(np.int64))
        with torch.no_grad():
            logits = self._engine(ids[None]).logits[0, :-1].float()
        return np.asarray(logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0].numpy())
