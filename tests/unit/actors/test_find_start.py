"""Where a run begins: anew, where it left off, or at a checkpoint of another run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from fakes import make_config, make_prompts

from actors.checkpoint_files import CheckpointFacts, begin, complete, partial_of
from actors.resume import Start, find_start
from real_ray.checkpoint import DriverState, to_json
from real_ray.config import Config
from real_ray.data import PromptCursor
from real_ray.errors import CheckpointError, ConfigError
from real_ray.ledger import LedgerState
from real_ray.tracking import RunDirectory
from real_ray.tracking.status import State, StatusTracker
from real_ray.types import Sampling

PROMPTS = make_prompts(5)
Make = Callable[..., Config]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Configs of runs in one folder; keys of checkpoint and run by name, sections as dicts."""

    def config(
        name: str = "r",
        *,
        resume: object = "auto",
        run: dict[str, object] | None = None,
        **sections: dict[str, object],
    ) -> Config:
        return make_config(
            run={"output_dir": str(tmp_path), "name": name, "num_steps": 8, **(run or {})},
            **{**sections, "checkpoint": {"resume": str(resume), **sections.get("checkpoint", {})}},
        )

    return config


def save(config: Config, step: int, **changes: object) -> Path:
    """A checkpoint of a run, as its learner and driver write it."""
    directory = config.run.checkpoint(step)
    begin(directory)
    state = DriverState(
        policy_version=step,
        prompts=PromptCursor(PROMPTS, seed=0, shuffle=True).fingerprint(),
        prompts_per_step=config.learner.prompts_per_step,
        sampling=Sampling(n=2, temperature=0.6, max_tokens=8),
        reward_function="rewards:f",
        ledger=LedgerState(closed_below=0, closed=(), outcomes={}),
        num_resampled=0,
        buffered=(),
    )
    (partial_of(directory) / "driver.json").write_text(to_json(state))
    facts = {
        "policy_version": step,
        "world_size": 1,
        "zero_stage": config.learner.zero_stage,
        "dtype": config.learner.dtype,
        "base_model": "none",
        "trust_remote_code": False,
        "lora_rank": 0,
        "lora_alpha": 32.0,
        "lora_target_modules": (),
        **changes,
    }
    complete(directory, facts=CheckpointFacts(**facts), parameters={})  # type: ignore[arg-type]
    return directory


def end(config: Config, state: State) -> None:
    with_status = RunDirectory(config, continued_after=0)
    StatusTracker(with_status, num_steps=config.num_steps, policy_version=8, checkpoint=None).end(
        state
    )
    with_status.close()


def refusal(config: Config, error: type[Exception] = CheckpointError) -> str:
    with pytest.raises(error) as refused:
        find_start(config, PROMPTS)
    assert "\n" not in str(refused.value)
    return str(refused.value)


class TestAuto:
    def test_a_first_run_begins_anew(self, make: Make, tmp_path: Path) -> None:
        assert find_start(make(), PROMPTS) == Start()
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("overwrite", [False, True])
    def test_the_newest_complete_checkpoint_is_continued(self, make: Make, overwrite: bool) -> None:
        config = make(run={"overwrite": overwrite})
        save(config, 2)
        newest = save(config, 4)
        (save(config, 6) / "driver.json").unlink()
        begin(config.run.checkpoint(7))
        start = find_start(config, PROMPTS)
        assert start == Start(checkpoint=newest, step=4, continues=True)
        assert start.describe(config) == (
            f"continuing run r from step 4 ({newest}); to start anew: --checkpoint.resume never "
            "--run.overwrite true"
        )

    def test_never_begins_anew(self, make: Make) -> None:
        save(make(), 4)
        assert find_start(make(resume="never"), PROMPTS) == Start()

    def test_checkpoints_that_cannot_be_read_are_not_replaced(self, make: Make) -> None:
        config = make(run={"overwrite": True})
        (save(config, 4) / "driver.json").unlink()
        message = refusal(config)
        assert "the newest is step_000004, but none that this real-ray can read" in message
        assert "--checkpoint.resume never --run.overwrite true" in message

    def test_a_name_that_is_a_link(self, make: Make, tmp_path: Path) -> None:
        checkpoint = save(make("real"), 4)
        (tmp_path / "r").symlink_to(tmp_path / "real")
        assert find_start(make(), PROMPTS) == Start(checkpoint=checkpoint, step=4, continues=True)

    def test_settings_that_are_others_now_are_told(self, make: Make) -> None:
        end(make(loss={"tau": 0.5}), "stopped")
        checkpoint = save(make(), 4)
        config = make(loss={"tau": 0.3}, run={"num_steps": 9}, tracking={"samples": False})
        start = find_start(config, PROMPTS)
        assert start.changes == ("loss.tau 0.5 -> 0.3",)
        assert start.describe(config).startswith(
            f"continuing run r from step 4 ({checkpoint}), with loss.tau 0.5 -> 0.3; to start anew"
        )


class TestFinished:
    def test_there_is_nothing_left_to_do(self, make: Make) -> None:
        config = make(run={"overwrite": True})
        save(config, 8)
        end(config, "finished")
        start = find_start(config, PROMPTS)
        assert start == Start(is_finished=True)
        assert start.describe(config) == (
            f"run r is finished; its files are in {config.run.directory}. To train on, raise "
            "run.num_steps or run.num_epochs; to start anew: --checkpoint.resume never "
            "--run.overwrite true"
        )

    @pytest.mark.parametrize(
        ("changes", "named"),
        [
            ({"loss": {"type": "grpo"}}, "loss.type real -> grpo"),
            ({"model": {"name_or_path": "other"}}, "model.name_or_path none -> other"),
            ({"run": {"seed": 3}}, "run.seed 0 -> 3"),
        ],
    )
    def test_another_experiment_is_not_taken_for_done(
        self, make: Make, changes: dict[str, dict[str, object]], named: str
    ) -> None:
        end(make(), "finished")
        message = refusal(make(**changes), ConfigError)
        assert f"is finished, and was another one: {named}. Choose another --run.name" in message
        same = make(eval={"at_end": False}, cluster={"num_cpus": 3}, checkpoint={"save_steps": 1})
        assert find_start(same, PROMPTS).is_finished

    @pytest.mark.parametrize("state", ["running", "failed", "stopped"])
    def test_its_last_checkpoint_is_not_its_end(self, make: Make, state: State) -> None:
        """The model and the last evaluation are still to come."""
        save(make(), 8)
        end(make(), state)
        assert find_start(make(), PROMPTS).continues

    def test_more_steps_go_on(self, make: Make) -> None:
        save(make(), 6)
        end(make(), "finished")
        assert find_start(make(run={"num_steps": 9}), PROMPTS).step == 6
        assert find_start(make(run={"num_steps": 7}), PROMPTS).is_finished

    def test_without_checkpoints_it_may_be_replaced(self, make: Make) -> None:
        end(make(), "finished")
        assert find_start(make(), PROMPTS).is_finished
        assert find_start(make(run={"overwrite": True}), PROMPTS) == Start()

    def test_a_status_that_cannot_be_read_stops_nothing(self, make: Make) -> None:
        save(make(), 8)
        (make().run.directory / "status.json").write_text("{")
        assert find_start(make(), PROMPTS).step == 8


class TestPath:
    def test_of_another_run(self, make: Make) -> None:
        other = make("other")
        older, newest = save(other, 2), save(other, 4)
        for path, step in ((older, 2), (newest, 4), (other.run.directory, 4)):
            config = make(resume=path)
            start = find_start(config, PROMPTS)
            assert start == Start(checkpoint=other.run.checkpoint(step), step=step)
            assert start.describe(config) == (
                f"run r in {config.run.directory}, from step {step} ({start.checkpoint})"
            )

    def test_what_began_there_goes_on_where_it_left_off(self, make: Make) -> None:
        """The same command, again, as after a restart of the machine."""
        other = make("other")
        foreign = save(other, 4)
        branch = make(resume=foreign, run={"overwrite": True})
        assert find_start(branch, PROMPTS) == Start(checkpoint=foreign, step=4)
        end(branch, "failed")
        assert find_start(branch, PROMPTS) == Start(checkpoint=foreign, step=4)
        own = save(branch, 6)
        assert find_start(branch, PROMPTS) == Start(checkpoint=own, step=6, continues=True)
        end(branch, "finished")
        assert find_start(branch, PROMPTS).is_finished
        # Another origin is another run.
        elsewhere = make(resume=save(make("third"), 2))
        assert find_start(elsewhere, PROMPTS).step == 2

    def test_of_this_run(self, make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        newest = save(make(), 4)
        monkeypatch.chdir(tmp_path)
        for path in (newest, make().run.directory, "r/checkpoints/step_000004", "./r"):
            assert find_start(make(resume=path), PROMPTS) == Start(
                checkpoint=newest, step=4, continues=True
            )

    def test_newer_checkpoints_are_not_left_in_the_way(self, make: Make) -> None:
        older, newer = save(make(), 2), save(make(), 4)
        message = refusal(make(resume=older), ConfigError)
        assert f"has a newer checkpoint than step_000002, {newer}, which" in message
        assert "another --run.name to branch off, or remove" in message
        assert find_start(make("branch", resume=older), PROMPTS).step == 2

    def test_nothing_is_there(self, make: Make, tmp_path: Path) -> None:
        message = refusal(make(resume=tmp_path / "no"))
        assert message.startswith(f"checkpoint.resume: {tmp_path / 'no'} does not exist: give a")

    def test_a_run_without_a_complete_checkpoint(self, make: Make) -> None:
        other = make("other")
        (save(other, 2) / "driver.json").unlink()
        message = refusal(make(resume=other.run.directory))
        assert f"the run {other.run.directory} has no complete checkpoint" in message
        assert "is missing" in refusal(make(resume=other.run.checkpoint(2)))

    @pytest.mark.parametrize("num_steps", [3, 4])
    def test_no_step_is_left(self, make: Make, num_steps: int) -> None:
        newest = save(make("other"), 4)
        message = refusal(make(resume=newest, run={"num_steps": num_steps}), ConfigError)
        assert f"is of step 4, and the run ends after step {num_steps}. Raise" in message


class TestFit:
    """What does not fit is found before anything is started."""

    @pytest.mark.parametrize("resume", ["auto", "path"])
    def test_other_learner_settings(self, make: Make, resume: str) -> None:
        checkpoint = save(make(), 4)
        resume = str(checkpoint) if resume == "path" else resume
        message = refusal(make(resume=resume, learner={"zero_stage": 3}))
        assert "saved with learner.zero_stage = 2, but it is 3 now" in message

    def test_other_prompts(self, make: Make) -> None:
        save(make(), 4)
        with pytest.raises(CheckpointError, match=r"other training prompts than data\.train = "):
            find_start(make(), PROMPTS[:4])
        assert "run.seed changed" in refusal(make(run={"seed": 1}))

    def test_steps_of_another_size_in_the_same_epochs(self, make: Make) -> None:
        save(make(), 4)
        config = make(run={"num_epochs": 20}, learner={"prompts_per_step": 2})
        message = refusal(config)
        assert "saved with learner.prompts_per_step = 3, and it is 2 now" in message
        assert find_start(make(learner={"prompts_per_step": 2}), PROMPTS).step == 4

    @pytest.mark.parametrize("lora_rank", [8, 0])
    def test_another_base_model(self, make: Make, lora_rank: int) -> None:
        targets = ("all-linear",)
        save(make(), 4, base_model="Qwen/A", lora_rank=lora_rank, lora_target_modules=targets)
        sections = {"learner": {"lora_rank": 8}} if lora_rank else {"loss": {"beta": 0.1}}
        message = refusal(make(**sections))
        assert "was trained on the model Qwen/A, and model.name_or_path is none now" in message
        assert find_start(make(**sections, model={"name_or_path": "./Qwen/A"}), PROMPTS).step == 4

    def test_without_adapter_and_kl_the_base_model_does_not_matter(self, make: Make) -> None:
        save(make(), 4, base_model="Qwen/A")
        assert find_start(make(), PROMPTS).step == 4

    def test_another_number_of_ranks_fits(self, make: Make) -> None:
        save(make(), 4, world_size=4)
        assert find_start(make(), PROMPTS).step == 4
