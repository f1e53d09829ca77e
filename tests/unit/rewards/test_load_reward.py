import sys
from pathlib import Path

import pytest

from real_ray.errors import ConfigError
from real_ray.rewards import load_reward

MODULE = """
def good(completions, **kwargs):
    return [float(len(text)) for text in completions]

async def later(completions, **kwargs):
    return []

class Judge:
    def __call__(self, completions, **kwargs):
        return [2.0 for _ in completions]

judge = Judge()
number = 3
"""


@pytest.fixture(autouse=True)
def own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's directory with modules of their own, as the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_rewards.py").write_text(MODULE)
    (tmp_path / "broken_rewards.py").write_text("import no_such_library_here")
    (tmp_path / "crashing_rewards.py").write_text("raise RuntimeError('no licence')")
    for module in ("my_rewards", "broken_rewards", "crashing_rewards"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    return tmp_path


def test_a_function_in_the_current_directory_is_found() -> None:
    reward = load_reward("my_rewards:good")
    assert reward.name == "my_rewards:good"
    assert reward.function(["a", "bcd"], prompt="", answer="", columns={}) == [1.0, 3.0]


def test_a_callable_object_is_a_function() -> None:
    assert load_reward("my_rewards:judge").function(["a"], prompt="", answer="", columns={}) == [2]


def test_the_current_directory_does_not_shadow_libraries(own_directory: Path) -> None:
    load_reward("my_rewards:good")
    assert sys.path[-1] == str(own_directory)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "last_numbr",
            r"no built-in reward `last_numbr` \(did you mean `last_number`\?\); built in",
        ),
        ("my_rewards.good", r"no built-in reward .* Write your own as package\.module:function"),
        ("my_rewards:", r"not of the form package\.module:function"),
        (":good", r"not of the form package\.module:function"),
        ("no_module_here:f", r"cannot be imported: ModuleNotFoundError: No module named 'no_mod"),
        ("broken_rewards:f", r"ModuleNotFoundError: No module named 'no_such_library_here'"),
        ("crashing_rewards:f", r"cannot be imported: RuntimeError: no licence"),
        ("my_rewards:goood", r"my_rewards\.py\) has no `goood` \(did you mean `good`\?\)"),
        ("my_rewards:number", r"is not a function but int 3"),
        ("my_rewards:Judge", r"is not a function but type .*; give a function"),
        ("my_rewards:later", r"is an async function, which is not supported"),
    ],
)
def test_what_cannot_be_used_is_refused_with_the_reason(spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_reward(spec)


def test_the_example_of_a_custom_reward_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[3])
    reward = load_reward("examples.custom_reward:brevity_and_correct")
    completions = ["17", "It is 17", "Let me think about it. It is 17", "18"]
    assert reward.function(completions, prompt="p", answer="17", columns={}) == [1, 1, 0.5, 0]
