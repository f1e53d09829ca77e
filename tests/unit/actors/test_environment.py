"""What the actors find in their environment: a few settings, and nothing of the user's."""

from __future__ import annotations

import pytest

from actors.environment import engine_env, learner_env
from real_ray.placement import Device


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_only_settings_of_our_own_are_handed_on(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of a user's environment in a runtime_env stops Ray's agent, and would hand on secrets."""
    before = engine_env(device) | learner_env(device)
    for name in ("WANDB_API_KEY", "HF_TOKEN", "SOMETHING_ELSE"):
        monkeypatch.setenv(name, "secret")
    after = engine_env(device) | learner_env(device)
    assert after == before
    assert len(after) <= 12
    assert "PATH" not in after
