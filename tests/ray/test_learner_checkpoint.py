"""Steps that are skipped, checkpoints and exports, with DeepSpeed engines of one and two ranks."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from engine_rank import EngineRank, State
from local_ray import local_ray
from tiny_model import build_model

from actors.checkpoint_files import CheckpointFacts, check_fits, read_facts, resolve
from actors.export import export
from actors.node import LOOPBACK, free_port
from actors.universal import prepare
from actors.zero import StepOutcome
from real_ray.errors import CheckpointError, LearnerError, ModelError, UserError

BEFORE, AFTER = [1, 2], [3, 4]  # seeds of the steps before and after a checkpoint
SMALL = 5e-4  # rounding, which Adam enlarges in its first steps; a step moves a weight by 3e-3


@dataclass(frozen=True)
class Ranks:
    actors: Sequence[Any]
    model: Path

    def all(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        calls = [getattr(actor, method).remote(*args, **kwargs) for actor in self.actors]
        return ray.get(calls, timeout=120)

    def build(self, *, model: Path | None = None, **options: Any) -> list[int | None]:
        return self.all("build", model or self.model, **options)

    def train(self, steps: Sequence[int], spoil: str = "") -> list[StepOutcome]:
        outcomes = self.all("train", steps, spoil)
        assert all(rank == outcomes[0] for rank in outcomes if not spoil)
        return outcomes[0]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def ranks(model: Path) -> Iterator[dict[int, Ranks]]:
    """Ranks by their number."""
    env = {
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[1]),  # where the actor's class is
    }
    with local_ray(env):
        actor = ray.remote(EngineRank).options(num_cpus=0.5)
        ports = {size: free_port(LOOPBACK) for size in (1, 2)}
        yield {
            size: Ranks([actor.remote(rank, size, port) for rank in range(size)], model)
            for size, port in ports.items()
        }


@pytest.fixture(scope="module")
def saved(ranks: dict[int, Ranks], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of ZeRO-2 in bfloat16. Not to be changed."""
    directory = tmp_path_factory.mktemp("saved") / "step_2"
    ranks[1].build(zero_stage=2, dtype="bfloat16")
    ranks[1].train(BEFORE)
    ranks[1].all("save", directory, 2)
    return directory


def assert_same(got: list[State], expected: list[State]) -> None:
    for mine, other in zip(got, expected, strict=True):
        assert mine.keys() == other.keys()
        for name, value in other.items():
            np.testing.assert_array_equal(mine[name], value, err_msg=name)


def assert_same_dropout(got: list[list[np.ndarray]], expected: list[list[np.ndarray]]) -> None:
    for mine, other in zip(got, expected, strict=True):  # ranks
        np.testing.assert_array_equal(mine, other)


@pytest.mark.parametrize(
    ("size", "options", "spoil"),
    [
        (2, {"zero_stage": 0, "dtype": "float32"}, "gradient"),
        (2, {"zero_stage": 0, "dtype": "bfloat16"}, "loss"),
        (1, {"zero_stage": 1, "dtype": "float32"}, "loss"),
        (2, {"zero_stage": 1, "dtype": "float32", "offload": True}, "gradient"),
        (2, {"zero_stage": 2, "dtype": "float32"}, "loss"),
        (2, {"zero_stage": 2, "dtype": "bfloat16", "offload": True}, "loss"),
        (2, {"zero_stage": 3, "dtype": "float32"}, "gradient"),
        (2, {"zero_stage": 3, "dtype": "float32", "offload": True}, "loss"),
    ],
)
def test_a_step_without_a_finite_gradient_leaves_no_trace(
    ranks: dict[int, Ranks], size: int, options: dict[str, Any], spoil: str
) -> None:
    group = ranks[size]
    group.build(**options)
    outcomes = group.train([1, 2, -3, 4], spoil)
    state = group.all("state")
    group.build(**options)
    expected = group.train([1, 2, 4])
    assert [outcome.applied for outcome in outcomes] == [True, True, False, True]
    assert not math.isfinite(outcomes[2].grad_norm)
    assert [outcomes[i] for i in (0, 1, 3)] == expected
    assert all(outcome.grad_norm > 0.5 for outcome in expected), "the norm is that before clipping"
    assert_same(state, group.all("state"))


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (2, {"zero_stage": 0}),
        (2, {"zero_stage": 1}),
        (1, {"zero_stage": 2}),
        (2, {"zero_stage": 2, "dtype": "bfloat16", "offload": True}),
        (2, {"zero_stage": 3}),
        (1, {"zero_stage": 3, "dtype": "bfloat16", "offload": True}),
        (2, {"zero_stage": 2, "lora": True}),
        (2, {"zero_stage": 3, "lora": True, "dtype": "bfloat16"}),
    ],
)
def test_as_many_ranks_go_on_to_the_bit(
    ranks: dict[int, Ranks], tmp_path: Path, size: int, options: dict[str, Any]
) -> None:
    group = ranks[size]
    group.build(**options)
    group.train(BEFORE)
    group.all("dropout", 3)
    group.all("save", tmp_path / "step_2", 2)
    group.train(AFTER)
    expected, dropped = group.all("state"), group.all("dropout", 2)
    assert set(group.build(**options, checkpoint=tmp_path / "step_2")) == {2}
    group.train(AFTER)
    assert_same(group.all("state"), expected)
    assert_same_dropout(group.all("dropout", 2), dropped)


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (2, {"zero_stage": 0}),
        (2, {"zero_stage": 1}),
        (1, {"zero_stage": 2}),
        (2, {"zero_stage": 2, "lora": True}),
        (1, {"zero_stage": 3}),
        (2, {"zero_stage": 3}),
        (1, {"zero_stage": 3, "lora": True}),
    ],
)
def test_another_number_of_ranks_goes_on_up_to_rounding(
    ranks: dict[int, Ranks], tmp_path: Path, size: int, options: dict[str, Any]
) -> None:
    before, after = ranks[size], ranks[3 - size]
    before.build(**options)
    before.train(BEFORE)
    before.all("save", tmp_path / "step_2", 2)
    at_checkpoint = before.all("state")[0]
    before.train(AFTER)
    expected = before.all("state")[0]
    prepare(tmp_path / "step_2", 3 - size)
    assert (tmp_path / "step_2" / "universal").is_dir() == (options["zero_stage"] > 0)
    assert set(after.build(**options, checkpoint=tmp_path / "step_2")) == {2}
    loaded = after.all("state")[0]
    after.train(AFTER)
    got = after.all("state")[0]
    for name, value in at_checkpoint.items():
        if name.endswith(("/weight", "/master")):
            np.testing.assert_array_equal(loaded[name], value, err_msg=name)
            np.testing.assert_allclose(got[name], expected[name], atol=SMALL, rtol=0, err_msg=name)
    for name in ("steps", "lr", "weight_decay"):
        np.testing.assert_array_equal(got[name], expected[name], err_msg=name)


def test_another_number_of_ranks_keeps_its_own_random_numbers(
    ranks: dict[int, Ranks], tmp_path: Path
) -> None:
    for before, after in ((ranks[1], ranks[2]), (ranks[2], ranks[1])):
        before.build(zero_stage=0)
        before.all("dropout", 3)
        before.all("save", tmp_path / "step_2", 2)
        after.build(zero_stage=0)
        fresh = after.all("dropout", 2)
        after.build(zero_stage=0, checkpoint=tmp_path / "step_2")
        assert_same_dropout(after.all("dropout", 2), fresh)


def test_a_crash_while_saving_harms_no_checkpoint_and_leaves_none_that_looks_complete(
    ranks: dict[int, Ranks], tmp_path: Path
) -> None:
    group, directory = ranks[2], tmp_path / "step_2"
    group.build(zero_stage=2)
    group.all("save", directory, 2)
    for target in (directory, tmp_path / "step_3"):
        with pytest.raises(LearnerError, match="no space left"):
            group.all("save", target, 3, fails=True)
    assert read_facts(directory).policy_version == 2
    for left in tmp_path.iterdir():
        if left != directory:
            with pytest.raises(CheckpointError, match=r"has no checkpoint\.json"):
                read_facts(left)
    group.all("save", directory, 3)
    assert read_facts(directory).policy_version == 3
    group.all("save", tmp_path / "step_3", 3)
    assert {path.name for path in tmp_path.iterdir()} == {"step_2", "step_3"}


def test_only_as_many_checkpoints_are_kept_as_asked_for(
    ranks: dict[int, Ranks], tmp_path: Path
) -> None:
    group = ranks[2]
    group.build(zero_stage=2)
    for version in (1, 2, 3):
        group.all("save", tmp_path / f"step_{version}", version, save_total_limit=2)
    with pytest.raises(LearnerError, match="no space left"):
        group.all("save", tmp_path / "step_4", 4, fails=True, save_total_limit=1)
    assert sorted(path.name for path in tmp_path.glob("step_*")) == ["step_2", "step_3"]
    group.all("save", tmp_path / "step_4", 4)
    assert sorted(path.name for path in tmp_path.glob("step_*")) == ["step_2", "step_3", "step_4"]


def test_ranks_that_write_to_different_places_are_noticed(
    ranks: dict[int, Ranks], tmp_path: Path
) -> None:
    places = [tmp_path / "one" / "step_2", tmp_path / "two" / "step_2"]
    ranks[2].build(zero_stage=0)
    saves = [
        rank.save.remote(place, 2) for rank, place in zip(ranks[2].actors, places, strict=True)
    ]
    with pytest.raises(LearnerError, match=r"state of 1 of 2 learner ranks: all nodes must see"):
        ray.get(saves, timeout=120)


def test_a_run_that_died_between_the_two_renames_still_has_its_checkpoint(
    saved: Path, tmp_path: Path
) -> None:
    shutil.copytree(saved, tmp_path / ".step_2.replaced")
    assert read_facts(resolve(tmp_path / "step_2")) == read_facts(saved)


class TestWhatDoesNotFit:
    @pytest.mark.parametrize(
        ("damage", "message"),
        [
            (lambda d: (d / "checkpoint.json").unlink(), "has no checkpoint.json: give a complete"),
            (lambda d: (d / "model" / "config.json").unlink(), "config.json is missing, expected"),
            (lambda d: (d / "model" / "config.json").write_text("{"), "config.json has 1 bytes"),
            (lambda d: (d / "checkpoint.json").write_text("{"), "cannot be read"),
            (lambda d: (d / "checkpoint.json").write_text('{"format": 9}'), "has format 9, and"),
            (shutil.rmtree, "step_2 does not exist: give a complete checkpoint"),
        ],
    )
    def test_a_damaged_checkpoint(
        self, saved: Path, tmp_path: Path, damage: Callable[[Path], object], message: str
    ) -> None:
        directory = shutil.copytree(saved, tmp_path / "step_2")
        damage(directory)
        with pytest.raises(CheckpointError, match=message):
            read_facts(directory)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"zero_stage": 3}, r"learner\.zero_stage = 2, but it is 3 now: set it to 2, or"),
            ({"dtype": "float32"}, r"learner\.dtype = bfloat16, but it is float32 now"),
            ({"lora_rank": 8}, r"learner\.lora_rank = 0, but it is 8 now"),
        ],
    )
    def test_other_settings(self, saved: Path, changes: dict[str, Any], message: str) -> None:
        facts = {
            "policy_version": 0,
            "world_size": 7,
            "zero_stage": 2,
            "dtype": "bfloat16",
            "base_model": "another/path",
            "trust_remote_code": False,
            "lora_rank": 0,
            "lora_alpha": 1.0,
            "lora_target_modules": (),
        }
        check_fits(saved, CheckpointFacts(**facts))  # those that may differ
        with pytest.raises(CheckpointError, match=message):
            check_fits(saved, CheckpointFacts(**facts | changes))

    def test_another_model(
        self, ranks: dict[int, Ranks], saved: Path, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        other = build_model(tmp_path_factory.mktemp("other"), num_layers=1)
        with pytest.raises(CheckpointError, match=r"layers\.1\..* and None in the model: set mod"):
            ranks[1].build(zero_stage=2, dtype="bfloat16", checkpoint=saved, model=other)


class TestExport:
    @pytest.mark.parametrize(
        "options",
        [
            {"zero_stage": 0},
            {"zero_stage": 2, "dtype": "bfloat16"},
            {"zero_stage": 3},
            {"zero_stage": 2, "lora": True},
            {"zero_stage": 3, "lora": True, "dtype": "bfloat16"},
        ],
    )
    def test_weights_are_those_of_the_learner(
        self, ranks: dict[int, Ranks], tmp_path: Path, options: dict[str, Any]
    ) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        group, lora = ranks[2], options.get("lora", False)
        group.build(**options)
        group.train(BEFORE)
        group.all("save", tmp_path / "run" / "checkpoints" / "step_9", 9)
        group.all("save", tmp_path / "run" / "checkpoints" / "step_10", 10)
        expected = group.all("hugging_face_weights")[0]
        done = export(tmp_path / "run", tmp_path / "model")
        assert done.policy_version == 10
        assert done.num_tensors == len(expected)
        assert done.dtype == options.get("dtype", "float32")
        model = AutoModelForCausalLM.from_pretrained(done.directory)
        assert model.dtype == getattr(torch, done.dtype)
        got = {name: p.detach().float().numpy() for name, p in model.named_parameters()}
        assert_same([got], [expected])
        AutoTokenizer.from_pretrained(done.directory)
        if lora:
            adapter = export(tmp_path / "run", tmp_path / "adapter", adapter=True)
            self.check_adapter(group, adapter.directory, options.get("dtype", "float32"))

    @staticmethod
    def check_adapter(group: Ranks, directory: Path, dtype: str) -> None:
        import torch
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        base = AutoModelForCausalLM.from_pretrained(group.model, dtype=getattr(torch, dtype))
        loaded = PeftModel.from_pretrained(base, str(directory))
        assert loaded.peft_config["default"].base_model_name_or_path == str(group.model)
        got = {
            name.replace(".default.", "."): parameter.detach().float().numpy()
            for name, parameter in loaded.named_parameters()
            if "lora_" in name
        }
        assert_same([got], [group.all("adapter")[0]])

    def test_a_base_model_that_is_gone(
        self, ranks: dict[int, Ranks], model: Path, tmp_path: Path
    ) -> None:
        base = shutil.copytree(model, tmp_path / "base")
        ranks[1].build(zero_stage=1, lora=True, model=base)
        ranks[1].all("save", tmp_path / "step_0", 0)
        shutil.rmtree(base)
        with pytest.raises(ModelError, match=r"the base model .*base, which the adapter was train"):
            export(tmp_path / "step_0", tmp_path / "model")
        assert not (tmp_path / "model").exists()

    def test_what_it_refuses(self, saved: Path, tmp_path: Path) -> None:
        full = tmp_path / "full"
        full.mkdir()
        (full / "notes").touch()
        with pytest.raises(UserError, match="full is not empty: give a directory that"):
            export(saved, full)
        with pytest.raises(CheckpointError, match="has no adapter, because all parameters"):
            export(saved, tmp_path / "model", adapter=True)
        (tmp_path / "run" / "checkpoints").mkdir(parents=True)
        with pytest.raises(CheckpointError, match="has no complete checkpoint: checkp"):
            export(tmp_path / "run", tmp_path / "model")

    def test_the_frozen_base_is_not_in_a_checkpoint_with_lora(
        self, ranks: dict[int, Ranks], tmp_path: Path
    ) -> None:
        import torch

        ranks[1].build(zero_stage=2, lora=True)
        ranks[1].all("save", tmp_path / "step_0", 0)
        (file,) = (tmp_path / "step_0" / "deepspeed").glob("*_model_states.pt")
        state = torch.load(file, weights_only=False)
        assert state["module"]
        assert all("lora_" in name for name in state["module"])
        assert not state["frozen_param_fragments"]
