"""What a model says about given tokens. Importing this package imports torch."""

from real_ray.policy.check import check_layout
from real_ray.policy.layout import CompletionTokens, PolicyInput, lay_out, one_sequence
from real_ray.policy.logprobs import linear_logprobs, token_metrics
from real_ray.policy.model import Policy, load_policy

__all__ = [
    "CompletionTokens",
    "Policy",
    "PolicyInput",
    "check_layout",
    "lay_out",
    "linear_logprobs",
    "load_policy",
    "one_sequence",
    "token_metrics",
]
