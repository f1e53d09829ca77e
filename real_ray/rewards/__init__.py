"""Reward functions: what they look like, the built-in ones, and how a group is scored."""

from real_ray.rewards.base import Reward, RewardFunction, load_reward
from real_ray.rewards.scoring import score_group

__all__ = ["Reward", "RewardFunction", "load_reward", "score_group"]
