"""From what vLLM returns to a `Completion`."""

from __future__ import annotations

from typing import Any

import numpy as np

from real_ray.errors import GenerationError
from real_ray.types import Completion, FinishReason, VersionSpan


def completion_of(uid: str, output: Any) -> Completion:
    """Translate vLLM's `CompletionOutput`.

    Raises:
        GenerationError: aborted, without log-probs or versions, or with log-probs that are no
            log-probs.
    """
    where = f"group {uid}, member {output.index}"
    token_ids = np.array(output.token_ids, dtype=np.int32)
    if output.finish_reason not in ("stop", "length"):
        raise GenerationError(f"{where}: the engine ended it with {output.finish_reason!r}")
    reason: FinishReason = output.finish_reason
    if output.logprobs is None or not output.weight_versions:
        raise GenerationError(f"{where}: the engine returned no log-probs or no weight versions")
    logprobs = np.array(
        [
            entry[token].logprob
            for token, entry in zip(output.token_ids, output.logprobs, strict=True)
        ],
        dtype=np.float32,
    )
    if not np.isfinite(logprobs).all():
        position = int(np.flatnonzero(~np.isfinite(logprobs))[0])
        raise GenerationError(
            f"{where}: the engine's log-prob of token {position} is {logprobs[position]}"
        )
    spans = tuple(
        VersionSpan(version=int(span.version), start=span.start, end=span.end)
        for span in output.weight_versions
    )
    return Completion(
        index=output.index,
        token_ids=token_ids,
        generator_logprobs=logprobs,
        spans=spans,
        text=output.text,
        finish_reason=reason,
    )
