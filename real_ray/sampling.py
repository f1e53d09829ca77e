"""Sampling one group, with further tries."""

from __future__ import annotations

from real_ray.errors import GenerationError
from real_ray.roles import GeneratorPool
from real_ray.tracking import Tracker
from real_ray.types import Prompt, SampledTicket, Sampling


async def sample_group(
    prompt: Prompt,
    sampling: Sampling,
    *,
    generators: GeneratorPool,
    max_retries: int,
    tracker: Tracker,
) -> SampledTicket:
    """Sample the completions of a prompt, again if that fails.

    Raises:
        GenerationError: that of the last try.
    """
    for attempt in range(max_retries + 1):
        try:
            return await generators.generate(prompt, sampling)
        except GenerationError as error:
            tracker.event("generation failed", f"{error} (try {attempt + 1})")
            last = error
    raise last
