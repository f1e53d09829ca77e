"""LearnerActor: one data-parallel rank of the policy under DeepSpeed."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from actors.node import listen, num_cores
from actors.protocol import LearnerSpec, SentWeights, SyncRendezvous, TrainedBatch
from real_ray.batching import GroupShape, collate, plan_microbatches
from real_ray.errors import LearnerError
from real_ray.loss import batch_loss, count_groups, group_loss, group_weights, labels, real_metrics
from real_ray.loss import two_sided as two_sided_groups
from real_ray.partial_metrics import PartialMetrics
from real_ray.policy import (
    TensorBatch,
    model_logprobs,
    sequence_scores,
    token_metrics,
    use_float32_head,
)
from real_ray.types import (
    Completion,
    FloatArray,
    IntArray,
    Prompt,
    RolloutGroup,
    SampledGroup,
    SampleRecord,
    VersionSpan,
)


class LearnerActor:
    """A Ray actor around one rank of a DeepSpeed engine. All ranks are called together."""

    def __init__(self, spec: LearnerSpec) -> None:
        self._spec = spec
        self._device = torch.device(spec.device)
        self._dtype: torch.dtype = getattr(torch, spec.config.dtype)

    def start(self, master_address: str, master_port: int) -> None:
        """Join the process group of the learner, load the model and build the optimiser.

        Rank 0 listens on ``master_address`` only.
        """
        spec = self._spec
        os.environ["DS_ACCELERATOR"] = spec.device
        if spec.device == "cpu":
            torch.set_num_threads(spec.num_threads or num_cores())
        import deepspeed
        from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

        set_seed(spec.seed)
        _init_process_group(spec, master_address, master_port)
        # An optional reduction that DeepSpeed would compile first, which needs a C++ compiler.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed()
        tokenizer = AutoTokenizer.from_pretrained(
            spec.model, trust_remote_code=spec.trust_remote_code
        )
        pad = tokenizer.pad_token_id
        self._pad_token_id = pad if pad is not None else tokenizer.eos_token_id or 0
        config = spec.config
        model = AutoModelForCausalLM.from_pretrained(
            spec.model,
            dtype=self._dtype,  # DeepSpeed keeps float32 master weights beside bfloat16 ones
            trust_remote_code=spec.trust_remote_code,
        )
        use_float32_head(model)
        if config.gradient_checkpointing:
            model.gradient_checkpointing_enable()
        model.train()
        optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=config.learning_rate,
            betas=(config.adam_beta1, config.adam_beta2),
            weight_decay=config.weight_decay,
            fused=True,
        )
        self._engine, _, _, _ = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            lr_scheduler=lambda o: _schedule(o, spec),
            config=_deepspeed_config(spec),
        )

    def train(self, policy_version: int, *groups: RolloutGroup) -> TrainedBatch:
        """One optimiser step. Every rank is given its share of the batch's groups.

        The gradient is that of the mean group loss over the whole batch on one process: each
        micro-batch holds whole groups and counts its share of the batch; DeepSpeed averages over
        ranks, hence the factor of the number of ranks.

        Raises:
            LearnerError: the gradient is not finite; the policy is of no use any more.
        """
        spec, loss_config = self._spec, self._spec.loss
        microbatches = self._microbatches(groups)
        num_microbatches, num_groups = self._agree(len(microbatches), groups)
        parts: list[PartialMetrics] = []
        samples: list[SampleRecord] = []
        for index in range(num_microbatches):
            # ZeRO gathers and reduces in lockstep: a rank that has run out computes along.
            real = index < len(microbatches)
            chunk = microbatches[index] if real else [_filler()]
            batch = TensorBatch.of(collate(chunk, self._pad_token_id), self._device)
            self._engine.set_gradient_accumulation_boundary(index == num_microbatches - 1)
            logprobs, entropy = model_logprobs(self._engine, batch, spec.temperature)
            rows = sequence_scores(logprobs, batch.generator_logprobs, batch.completion_mask)
            scores = batch.by_group(rows)
            positive = labels(batch.rewards, loss_config.positive_above)
            losses = group_loss(scores, positive, loss_config.tau)
            loss = batch_loss(losses, num_groups) * spec.world_size * float(real)
            self._engine.backward(loss, scale_wrt_gas=False)
            if real:
                parts += [
                    real_metrics(scores, positive, loss_config.tau, num_groups=num_groups),
                    token_metrics(
                        logprobs, batch.generator_logprobs, entropy, batch.completion_mask
                    ),
                ]
                weights = group_weights(scores, positive, loss_config.tau)
                samples += _sample_records(chunk, positive, scores.detach(), weights)
        learning_rate = self._engine.get_lr()[0]
        grad_norm = self._step()
        if not math.isfinite(grad_norm):
            raise LearnerError(
                f"the gradient of step {policy_version} is not finite (norm {grad_norm}, groups "
                f"{', '.join(group.uid for group in groups)}): lower learner.learning_rate, or use "
                "learner.dtype float32"
            )
        return TrainedBatch(
            metrics=PartialMetrics.merge(parts),
            grad_norm=grad_norm,
            learning_rate=float(learning_rate),
            num_microbatches=num_microbatches,
            samples=tuple(samples),
        )

    def connect(self, rendezvous: SyncRendezvous, generators: Sequence[Any]) -> None:
        """Form the weight-transfer group with all generators; every rank is called together.

        Args:
            generators: Ray handles of the `GeneratorActor`s, in the order of their ranks.
        """
        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

        from actors.sync import GeneratorClient, register, trainer_init_info
        from actors.weight_source import DeepSpeedWeightSource

        register()
        self._client = GeneratorClient(
            generators,
            workers_per_generator=rendezvous.workers_per_generator,
            timeout_s=rendezvous.timeout_s,
        )
        self._source = DeepSpeedWeightSource(self._engine, self._dtype)
        self._sender = WeightTransferTrainerFactory.trainer_init(
            trainer_init_info(rendezvous, rank=self._spec.rank),
            client=self._client,
            source=self._source,
        )

    def send_weights(self, policy_version: int) -> SentWeights:
        """Send the weights to all generators, labelled ``policy_version``; all ranks together.

        Raises:
            SyncError: a generator failed or did not answer in time.
        """
        self._client.policy_version = policy_version
        self._sender.send_weights()
        metadata = self._source.metadata()
        return SentWeights(
            num_tensors=len(metadata),
            num_bytes=sum(m.dtype.itemsize * int(np.prod(m.shape)) for m in metadata),
        )

    def probe(self, token_ids: IntArray) -> FloatArray:
        """Log-probs, at temperature 1, of each token of a sequence but the first: [T - 1]."""
        ids = torch.from_numpy(token_ids.astype(np.int64)).to(self._device)[None]
        self._engine.eval()
        with torch.no_grad():
            logits = self._engine(input_ids=ids, use_cache=False).logits[0, :-1].float()
        self._engine.train()
        logprobs = torch.log_softmax(logits, dim=-1).gather(-1, ids[0, 1:, None])[:, 0]
        result: FloatArray = logprobs.cpu().numpy()
        return result

    def save(self, directory: str) -> None:
        """Write the policy as a Hugging Face directory; all ranks together, rank 0 writes."""
        from transformers import AutoTokenizer

        from actors.weight_source import full_parameters

        state = {
            name: tensor.cpu()
            for name, tensor in full_parameters(self._engine, self._dtype)
            if self._spec.rank == 0
        }
        if self._spec.rank == 0:
            self._engine.module.save_pretrained(directory, state_dict=state)
            AutoTokenizer.from_pretrained(
                self._spec.model, trust_remote_code=self._spec.trust_remote_code
            ).save_pretrained(directory)

    def _step(self) -> float:
        """Clip and apply the gradient; return its norm before clipping."""
        # The one optimiser that DeepSpeed does not wrap also does not tell the norm.
        unwrapped = self._spec.config.zero_stage == 0 and self._dtype == torch.float32
        gradients = [p.grad for p in self._engine.module.parameters() if unwrapped]
        norm = torch.nn.utils.get_total_norm([g for g in gradients if g is not None])
        self._engine.step()
        return float(norm if unwrapped else self._engine.get_global_grad_norm())

    def _microbatches(self, groups: Sequence[RolloutGroup]) -> list[list[RolloutGroup]]:
        shapes = [GroupShape.of(group) for group in groups]
        plan = plan_microbatches(shapes, self._spec.config.max_tokens_per_microbatch)
        return [[groups[i] for i in microbatch] for microbatch in plan]

    def _agree(self, num_microbatches: int, groups: Sequence[RolloutGroup]) -> tuple[int, int]:
        """Most micro-batches of a rank, and the denominator of the loss over all ranks."""
        mine = 0
        if groups:
            rewards = torch.from_numpy(np.stack([group.rewards for group in groups]))
            sided = two_sided_groups(labels(rewards, self._spec.loss.positive_above))
            mine = count_groups(sided, self._spec.loss.group_denominator)
        most = torch.tensor(num_microbatches, device=self._device)
        total = torch.tensor(mine, device=self._device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        dist.all_reduce(total, op=dist.ReduceOp.SUM)
        return int(most), int(total)


def _init_process_group(spec: LearnerSpec, address: str, port: int) -> None:
    os.environ |= {
        "RANK": str(spec.rank),
        "WORLD_SIZE": str(spec.world_size),
        "LOCAL_RANK": "0",  # Ray shows each rank its own GPU only
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }
    timeout = timedelta(seconds=spec.config.timeout_s)
    is_master = spec.rank == 0
    store = dist.TCPStore(
        address,
        port,
        world_size=spec.world_size,
        is_master=is_master,
        timeout=timeout,
        # torch would listen on all interfaces.
        master_listen_fd=listen(address, port).detach() if is_master else None,
        use_libuv=False,
    )
    dist.init_process_group(
        backend="nccl" if spec.device == "cuda" else "gloo",
        store=store,
        rank=spec.rank,
        world_size=spec.world_size,
        timeout=timeout,
    )


def _deepspeed_config(spec: LearnerSpec) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,  # `train` marks the last micro-batch itself
        "gradient_clipping": spec.config.max_grad_norm,
        "bf16": {"enabled": spec.config.dtype == "bfloat16"},
        "zero_optimization": {"stage": spec.config.zero_stage},
        # torch's AdamW needs no compiler at run time, unlike DeepSpeed's own.
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 2**31,
    }


def _schedule(optimizer: torch.optim.Optimizer, spec: LearnerSpec) -> Any:
    """Linear warm-up over `warmup_ratio` of the steps, then `lr_schedule` to the last step."""
    warmup = math.ceil(spec.config.warmup_ratio * spec.num_steps)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        done = (step - warmup) / max(1, spec.num_steps - warmup)
        match spec.config.lr_schedule:
            case "constant":
                return 1.0
            case "linear":
                return max(0.0, 1.0 - done)
            case "cosine":
                return 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def _filler() -> RolloutGroup:
    """The smallest whole group, for a forward and backward pass that counts for nothing."""
    token = np.zeros(1, dtype=np.int32)
    completions = tuple(
        Completion(
            index=index,
            token_ids=token,
            generator_logprobs=np.zeros(1, dtype=np.float32),
            spans=(VersionSpan(version=0, start=0, end=1),),
            text="",
            finish_reason="stop",
        )
        for index in range(2)
    )
    prompt = Prompt(uid="filler", text="", token_ids=token, answer="")
    sampled = SampledGroup(prompt=prompt, num_generations=2, completions=completions)
    return RolloutGroup(sampled=sampled, rewards=np.zeros(2, dtype=np.float32))


def _sample_records(
    groups: Sequence[RolloutGroup],
    positive: torch.Tensor,  # [G, N]
    scores: torch.Tensor,  # [G, N]
    weights: torch.Tensor,  # [G, N]
) -> list[SampleRecord]:
    return [
        SampleRecord(
            uid=group.uid,
            index=completion.index,
            prompt=group.sampled.prompt.text,
            completion=completion.text,
            answer=group.sampled.prompt.answer,
            reward=float(group.rewards[completion.index]),
            label=int(positive[row, completion.index]),
            score=float(scores[row, completion.index]),
            weight=float(weights[row, completion.index]),
            oldest_version=completion.oldest_version,
            newest_version=completion.newest_version,
            num_tokens=len(completion.token_ids),
            finish_reason=completion.finish_reason,
        )
        for row, group in enumerate(groups)
        for completion in group.sampled.completions
    ]
