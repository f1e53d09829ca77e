"""The whole configuration of a run."""

from __future__ import annotations

import math

from pydantic import Field, model_validator

from real_ray.config.base import Section
from real_ray.config.checkpoint import CheckpointConfig
from real_ray.config.cluster import ClusterConfig
from real_ray.config.data import DataConfig
from real_ray.config.eval import EvalConfig
from real_ray.config.learner import LearnerConfig
from real_ray.config.loss import LossConfig
from real_ray.config.model import ModelConfig
from real_ray.config.reward import RewardConfig
from real_ray.config.rollout import RolloutConfig
from real_ray.config.run import RunConfig
from real_ray.config.sync import SyncConfig
from real_ray.config.tracking import TrackingConfig


class Config(Section):
    """A run config. Every key is also a command-line flag: ``--section.key value``."""

    run: RunConfig = Field(default_factory=RunConfig)
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    reward: RewardConfig = Field(default_factory=RewardConfig)
    loss: LossConfig = Field(default_factory=LossConfig)
    learner: LearnerConfig = Field(default_factory=LearnerConfig)
    sync: SyncConfig = Field(default_factory=SyncConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    tracking: TrackingConfig = Field(default_factory=TrackingConfig)
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)

    @property
    def max_model_length(self) -> int:
        """Longest prompt + completion in tokens that the engine must hold."""
        needed = self.data.max_prompt_length + self.rollout.max_completion_length
        return self.rollout.max_model_length or needed

    @property
    def num_slots(self) -> int:
        """Groups that may be in the pipeline at once; bounds their staleness."""
        times = self.rollout.oversample or self.rollout.max_staleness + 1
        return round(times * self.learner.prompts_per_step)

    @property
    def num_steps(self) -> int:
        """Steps of the run, once `with_num_steps` has counted them."""
        assert self.run.num_steps is not None
        return self.run.num_steps

    @property
    def num_epochs(self) -> int | None:
        """Passes over the training prompts; None: endless."""
        return self.run.num_epochs or (1 if self.run.num_steps is None else None)

    @model_validator(mode="after")
    def _check_oversample(self) -> Config:
        rollout = self.rollout
        if rollout.oversample is not None and rollout.oversample > rollout.max_staleness + 1:
            raise ValueError(
                f"rollout.oversample = {rollout.oversample:g} keeps groups in the pipeline that "
                f"train more than rollout.max_staleness = {rollout.max_staleness} versions late. "
                f"Raise max_staleness to {math.ceil(rollout.oversample) - 1}, or lower oversample "
                f"to {rollout.max_staleness + 1}"
            )
        return self

    @model_validator(mode="after")
    def _check_evaluation(self) -> Config:
        if self.eval.every is not None and self.data.eval is None:
            raise ValueError(
                f"eval.every = {self.eval.every} asks for evaluations, and data.eval is null. Give "
                "data.eval, or remove eval.every"
            )
        return self

    @model_validator(mode="after")
    def _check_ports(self) -> Config:
        if self.learner.port and self.learner.port == self.sync.port:
            raise ValueError(
                f"learner.port and sync.port are both {self.sync.port}: give two ports"
            )
        return self

    @model_validator(mode="after")
    def _check_lengths(self) -> Config:
        needed = self.data.max_prompt_length + self.rollout.max_completion_length
        if self.max_model_length < needed:
            raise ValueError(
                f"rollout.max_model_length = {self.max_model_length} is below "
                f"data.max_prompt_length + rollout.max_completion_length = {needed}"
            )
        return self

    @model_validator(mode="after")
    def _check_microbatch(self) -> Config:
        prompt, completion = self.data.max_prompt_length, self.rollout.max_completion_length
        budget = self.learner.max_tokens_per_microbatch
        if budget < prompt + completion:
            raise ValueError(
                f"learner.max_tokens_per_microbatch = {budget} cannot hold one sequence of "
                f"data.max_prompt_length = {prompt} and rollout.max_completion_length = "
                f"{completion} tokens. Raise it to {prompt + completion} or more, or lower the "
                "other two"
            )
        return self
