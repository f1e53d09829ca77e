"""LearnerActor: one data-parallel rank of the policy under DeepSpeed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from actors.checkpoint import load, save
from actors.checkpoint_files import CheckpointFacts, check_fits
from actors.node import listen, num_cores
from actors.optimizer import build_optimizer, build_schedule
from actors.protocol import (
    LearnerSpec,
    SyncRendezvous,
    TrainedBatch,
    TrainRequest,
)
from actors.reference import build_reference
from actors.requests import layout_of
from actors.stacks import enable_stacks
from actors.train_batch import BatchTrainer
from actors.universal import deepspeed_checkpoint_config
from real_ray.checkpoint import from_json
from real_ray.errors import SyncError
from real_ray.policy import Policy, check_layout, load_policy, one_sequence
from real_ray.policy.lora import add_lora
from real_ray.types import FloatArray, IntArray, RolloutGroup
from real_ray.weights import SentWeights

if TYPE_CHECKING:
    from actors.adapter_sync import AdapterSender
    from actors.full_sync import FullSender


class LearnerActor:
    """A Ray actor around one rank of a DeepSpeed engine. All ranks are called together."""

    def __init__(self, spec: LearnerSpec) -> None:
        enable_stacks()
        self._spec = spec
        self._device = torch.device(spec.device)
        self._dtype: torch.dtype = getattr(torch, spec.config.dtype)
        self._sender: AdapterSender | FullSender | None = None  # after connect()

    def start(
        self, master_address: str, master_port: int, checkpoint: str | None = None
    ) -> int | None:
        """Join the process group of the learner, load the model and build the optimiser.

        Rank 0 listens on ``master_address`` only.

        Args:
            checkpoint: a directory as `save_checkpoint` writes it, to go on from.

        Returns:
            The policy version of the checkpoint.

        Raises:
            ModelError: the model cannot be loaded, adapted, or run in the layout that is asked for.
            CheckpointError: the checkpoint is damaged, or of a run with other settings.
        """
        spec = self._spec
        os.environ["DS_ACCELERATOR"] = spec.device
        if spec.device == "cpu":
            torch.set_num_threads(spec.num_threads or num_cores())
        import deepspeed
        from transformers import set_seed

        set_seed(spec.seed)
        _init_process_group(spec, master_address, master_port)
        # An optional reduction that DeepSpeed would compile first, which needs a C++ compiler.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed()
        return self._build(checkpoint)

    def _build(self, checkpoint: str | None = None) -> int | None:
        import deepspeed

        spec = self._spec
        settings = dict(spec.deepspeed)
        if checkpoint is not None:
            check_fits(Path(checkpoint), self._facts(0))
            for block, keys in deepspeed_checkpoint_config(
                Path(checkpoint), spec.world_size
            ).items():
                settings[block] = settings.get(block, {}) | keys  # beside those of the user
        policy = self._load_policy()
        self._engine, _, _, _ = deepspeed.initialize(
            model=policy,
            optimizer=build_optimizer(policy, spec.config),
            lr_scheduler=lambda optimizer: build_schedule(optimizer, spec),
            config=settings,
        )
        model = self._engine.module.model
        check_layout(
            self._engine,
            layout=layout_of(spec.config),
            vocabulary=model.config.get_text_config().vocab_size,
            dtype=self._dtype,
            device=self._device,
        )
        self._trainer = BatchTrainer(
            spec,
            self._engine,
            reference=build_reference(spec, self._engine) if spec.loss.beta > 0 else None,
            pad_token_id=model.config.get_text_config().pad_token_id or 0,
        )
        if checkpoint is None:
            return None
        return load(self._engine, Path(checkpoint), facts=self._facts(0)).policy_version

    def train(self, request: TrainRequest, *groups: RolloutGroup) -> TrainedBatch:
        """Train on this rank's members of a batch; see `BatchTrainer.train`."""
        return self._trainer.train(request, groups)

    def connect(self, rendezvous: SyncRendezvous, generators: Mapping[str, Any]) -> None:
        """Form the weight-transfer group anew with these generators; every rank is called together.

        An earlier group is dropped, in whatever state its members are.

        Args:
            generators: Ray handles of the `GeneratorActor`s by name, in the order of their ranks.

        Raises:
            SyncError: a generator failed or did not come in time.
            ResourceError: `sync.backend` cannot work here, or the port is in use.
        """
        from actors.adapter_sync import AdapterSender
        from actors.full_sync import FullSender
        from actors.sync import GeneratorClient

        model, spec = self._engine.module.model, self._spec
        if self._sender is not None:
            self._sender.close()
            self._sender = None
        self._client = GeneratorClient(
            generators,
            workers_per_generator=rendezvous.workers_per_generator,
            timeout_s=rendezvous.timeout_s,
        )
        if spec.config.lora_sync == "adapter":
            self._sender = AdapterSender(
                model, client=self._client, dtype=self._dtype, is_sender=spec.rank == 0
            )
        else:
            self._sender = FullSender(
                model,
                client=self._client,
                dtype=self._dtype,
                rendezvous=rendezvous,
                rank=spec.rank,
            )

    def send_weights(self, policy_version: int) -> SentWeights:
        """Send the weights to all generators, labelled ``policy_version``; all ranks together.

        Raises:
            SyncError: a generator failed or did not answer in time, or there is no group, after
                an error or before the first `connect`.
        """
        if self._sender is None:
            raise SyncError(
                f"weight sync of version {policy_version}: the learner is not connected to any "
                "generators"
            )
        self._client.policy_version = policy_version
        return self._sender.send_weights()

    def probe(self, token_ids: IntArray) -> FloatArray:
        """Log-probs, at temperature 1, of each token of a sequence but the first: [T - 1]."""
        inputs = one_sequence(token_ids, layout=layout_of(self._spec.config), device=self._device)
        with torch.no_grad():
            logprobs, _ = self._engine(inputs, 1.0)
        result: FloatArray = logprobs.cpu().numpy()
        return result

    def save(self, directory: str) -> None:
        """Write the policy as a Hugging Face directory; all ranks together, rank 0 writes."""
        from actors.weight_source import full_parameters

        state = {
            name: tensor.cpu()
            for name, tensor in full_parameters(self._engine.module.model, self._dtype)
            if self._spec.rank == 0
        }
        if self._spec.rank == 0:
            self._engine.module.model.save_pretrained(directory, state_dict=state)
            self._tokenizer().save_pretrained(directory)

    def save_checkpoint(
        self,
        directory: str,
        state: str,
        *groups: RolloutGroup,
        save_total_limit: int | None = None,
    ) -> None:
        """Write all that a run needs to go on; all ranks together, to a shared file system.

        Args:
            state: a `DriverState` as JSON.
            groups: on rank 0, its buffered groups, in its order.
            save_total_limit: `checkpoint.save_total_limit`.

        Raises:
            LearnerError: it cannot be written.
        """
        driver = from_json(state, place=directory)
        save(
            self._engine,
            Path(directory),
            facts=self._facts(driver.policy_version),
            tokenizer=self._tokenizer(),
            driver=driver,
            groups=groups,
            save_total_limit=save_total_limit,
        )

    def _facts(self, policy_version: int) -> CheckpointFacts:
        spec, config = self._spec, self._spec.config
        return CheckpointFacts(
            policy_version=policy_version,
            world_size=spec.world_size,
            zero_stage=config.zero_stage,
            dtype=config.dtype,
            base_model=spec.model,
            trust_remote_code=spec.trust_remote_code,
            lora_rank=config.lora_rank,
            lora_alpha=config.lora_alpha,
            lora_target_modules=tuple(config.lora_target_modules),
        )

    def _tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(
            self._spec.model, trust_remote_code=self._spec.trust_remote_code
        )

    def _load_policy(self) -> Policy:
        spec, config = self._spec, self._spec.config
        policy = load_policy(
            spec.model,
            dtype=self._dtype,  # DeepSpeed keeps float32 master weights beside bfloat16 ones
            packing=config.packing,
            trust_remote_code=spec.trust_remote_code,
        )
        if config.lora_rank:
            add_lora(
                policy.model,
                rank=config.lora_rank,
                alpha=config.lora_alpha,
                target_modules=config.lora_target_modules,
                seed=spec.seed,
            )
        if config.gradient_checkpointing:
            policy.model.gradient_checkpointing_enable({"use_reentrant": False})
        return policy.train()


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
