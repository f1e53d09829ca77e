"""What a model says about given tokens. Importing this package imports torch."""

from real_ray.policy.head import use_float32_head
from real_ray.policy.logprobs import (
    TensorBatch,
    completion_logprobs,
    model_logprobs,
    sequence_scores,
    token_metrics,
)

__all__ = [
    "TensorBatch",
    "completion_logprobs",
    "model_logprobs",
    "sequence_scores",
    "token_metrics",
    "use_float32_head",
]
