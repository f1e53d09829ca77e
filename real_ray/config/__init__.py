"""Run configs: strict sections, read from YAML and flags."""

from real_ray.config.changes import changed_settings
from real_ray.config.checkpoint import CheckpointConfig
from real_ray.config.cluster import ClusterConfig
from real_ray.config.data import DataConfig
from real_ray.config.eval import EvalConfig
from real_ray.config.learner import LearnerConfig
from real_ray.config.loader import dump_config, load_config
from real_ray.config.loss import LossConfig
from real_ray.config.model import ModelConfig
from real_ray.config.reward import RewardConfig
from real_ray.config.rollout import RolloutConfig
from real_ray.config.run import RunConfig
from real_ray.config.schema import Config
from real_ray.config.sync import SyncConfig
from real_ray.config.tracking import TrackingConfig

__all__ = [
    "CheckpointConfig",
    "ClusterConfig",
    "Config",
    "DataConfig",
    "EvalConfig",
    "LearnerConfig",
    "LossConfig",
    "ModelConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "SyncConfig",
    "TrackingConfig",
    "changed_settings",
    "dump_config",
    "load_config",
]
