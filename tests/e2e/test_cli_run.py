"""Whole runs from the command line, and what they leave behind: files, but no processes."""

from __future__ import annotations

import ipaddress
import itertools
import json
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
import yaml
from cli_runs import Run, read_rows, wait_for_line, wait_for_step
from safetensors.torch import load_file
from tiny_model import build_model

from real_ray.config import load_config
from real_ray.data import PromptCursor, load_prompts, load_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with tempfile.TemporaryDirectory(prefix="run-", dir="/tmp") as temporary:
        run = Run(tmp_path, Path(temporary))
        yield run
        assert run.left_behind(0.0) == []
        assert list(run.temporary.glob("real-ray-*")) == [], "temporary files are left"


def uids_in_order(model: Path, *, num_steps: int) -> list[list[str]]:
    """The groups of each step of a run in which none fails: those of its seed, as they come."""
    config = load_config(None, {"model.name_or_path": str(model), "data.train": "arithmetic"})
    prompts = load_prompts(config.data, load_tokenizer(config.model), split="train", seed=0)
    cursor = PromptCursor(prompts, seed=0, shuffle=True)
    uids = [draw.prompt.uid for draw in itertools.islice(cursor, 2 * num_steps)]
    return [uids[i : i + 2] for i in range(0, len(uids), 2)]


def test_a_run_writes_its_files_and_leaves_no_process(run: Run, model: Path) -> None:
    process = run.start(
        model,
        run={"num_steps": 4},
        learner={"dtype": "float32", "learning_rate": 3e-3},
        tracking={"wandb": "offline"},
    )
    wait_for_step(process, 1)
    listening = {
        ipaddress.ip_address(connection.laddr.ip.removeprefix("::ffff:"))
        for child in run.processes()
        for connection in child.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening
    assert all(ip.is_loopback for ip in listening), "something listens beyond this machine"
    out, err = process.communicate(timeout=180)
    assert process.returncode == 0, err
    assert run.left_behind() == []
    assert "accuracy on held-out prompts" in out

    path, rows = run.path, run.metrics()
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for key in (
        *("reward/mean", "real/two_sided", "async/staleness_max"),
        *("time/generate", "time/train", "time/sync"),
    ):
        assert all(isinstance(row[key], int | float) for row in rows), key
    # Without rounding to hide in, the smallest part of the weights that did not arrive would show.
    assert max(row["sync/probe_difference"] for row in rows) < 1e-4
    samples = run.samples(2)
    assert len(samples) == 2 * 4
    assert samples[0].keys() >= {"prompt", "completion", "reward", "label", "score", "weight"}
    assert all(s["reward"] == float(len(s["completion"]) % 2 == 0) == s["label"] for s in samples)
    assert (path / "reward_curve.png").read_bytes().startswith(b"\x89PNG")
    assert (path / "model" / "model.safetensors").exists()
    assert list((path / "wandb").glob("offline-run-*"))
    assert list((path / "logs").iterdir())
    assert "8 drawn = 8 trained\n" in out
    status = json.loads((path / "status.json").read_text())
    assert (status["state"], status["policy_version"]) == ("finished", 4)
    assert yaml.safe_load((path / "config.yaml").read_text())["run"]["num_steps"] == 4


@pytest.mark.parametrize("lora_sync", ["merged", "adapter"])
def test_lora_with_a_reference_and_several_optimiser_steps_is_trained_saved_and_exported(
    run: Run, model: Path, lora_sync: str
) -> None:
    process = run.start(
        model,
        run={"num_steps": 2},
        loss={"beta": 0.1, "old_logprobs": "blend"},
        learner={
            "dtype": "float32",
            "learning_rate": 3e-2,
            "minibatches_per_batch": 2,
            "max_tokens_per_microbatch": 120,
            "lora_rank": 4,
            "lora_sync": lora_sync,
        },
        checkpoint={"save_steps": 2},
        eval={"at_start": False},
    )
    _, err = process.communicate(timeout=180)
    assert process.returncode == 0, err
    assert run.left_behind() == []
    path, rows = run.path, run.metrics()
    # The last sync put trained adapters, not those of the start, into the generators.
    assert all(row["sync/probe_difference"] < 1e-3 for row in rows)
    assert [row["learner/skipped"] for row in rows] == [0, 0]
    assert rows[-1]["policy/kl"] > 0  # in the first step only if its first group is two-sided
    exported = run.directory / "exported"
    run.command("export", path, exported)
    final = load_file(path / "model" / "model.safetensors")
    again = load_file(exported / "model.safetensors")
    start = load_file(model / "model.safetensors")
    assert final.keys() == again.keys() == start.keys()
    assert all(torch.equal(final[name], again[name]) for name in final)
    moved = [name for name in start if not torch.equal(final[name], start[name].float())]
    assert len(moved) == 2 * 7, "the linear layers of both blocks"
    assert "real_ray" not in (exported / "config.json").read_text()
    assert "real_ray" not in (path / "model" / "config.json").read_text()


def test_a_failing_reward_ends_the_run_with_its_words_and_no_process(run: Run, model: Path) -> None:
    process = run.start(
        model,
        reward={"function": "my_rewards:fails_in_the_end", "on_error": "stop"},
        eval={"at_start": False},
    )
    out, err = process.communicate(timeout=180)
    assert process.returncode == 1
    assert run.left_behind() == []
    assert re.fullmatch(
        r"error: reward function `my_rewards:fails_in_the_end`, group arithmetic:\d+@0: raised "
        r"LookupError: no key for this answer \(.*my_rewards.py:14\)\n",
        err,
    ), err
    assert "start again" in out
    assert "ago: reward function `my_rewards:fails" in run.command("status", "tiny")


def test_a_run_is_scaled_healed_and_stopped_and_goes_on_with_nothing_lost(
    run: Run, model: Path
) -> None:
    changes: dict[str, dict[str, object]] = {
        "run": {"num_steps": 10_000},
        "rollout": {"num_threads": 1},
        "checkpoint": {"save_steps": None},
    }
    process = run.start(model, **changes)
    wait_for_step(process, 1)
    assert "generators   1 ready; 1 wanted" in (run.command("status", "tiny"))
    assert run.command("scale", "tiny", "--generators", "2").startswith(
        "run tiny: 1 starting, 1 ready; 2 wanted"
    )
    for child in run.processes():
        if "EngineCore" in " ".join(child.cmdline()):
            child.kill()
    assert "the engine of generator-0 has died" in wait_for_line(process, "generator lost: ")
    wait_for_line(process, "generator healed: generator-0, after ")
    step = int(json.loads((run.path / "status.json").read_text())["policy_version"])
    wait_for_step(process, step + 2)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM, err
    assert run.left_behind() == []
    assert re.search(r"^SIGTERM: stopping after the step under way", out, re.MULTILINE)
    stopped = run.metrics()[-1]["step"]
    assert f"stopped by SIGTERM after step {stopped} of 10000" in out
    assert out.splitlines()[-1] == f"resumable from step {stopped}"
    assert re.search(r"groups +\d+ drawn = \d+ trained( \+ \d+ (buffered|in flight))*\n", out)
    assert ": SIGTERM\n" in run.command("status", "tiny")

    changes["run"] = {"num_steps": int(stopped) + 2}
    process = run.start(model, **changes)
    out, err = process.communicate(timeout=180)
    assert process.returncode == 0, err
    assert run.left_behind() == []
    trained = 2 * (int(stopped) + 2)
    assert f"{trained} drawn = {trained} trained\n" in out


def test_a_second_signal_ends_a_run_at_once_and_it_goes_on_where_its_checkpoint_leaves_off(
    run: Run, model: Path
) -> None:
    changes: dict[str, dict[str, object]] = {
        "run": {"num_steps": 8, "stop_grace_s": 600},
        "learner": {"lr_schedule": "linear"},
        "checkpoint": {"save_steps": 2},
        "eval": {"every": 3},
    }
    process = run.start(model, **changes)
    wait_for_step(process, 3)
    assert any("VLLM" in " ".join(child.cmdline()) for child in run.processes())
    scoring = run.directory / "scoring"
    os.mkfifo(scoring)
    assert scoring.read_text(), "a group is being scored, and will be for ever"
    scoring.unlink()
    process.send_signal(signal.SIGTERM)
    wait_for_line(process, "SIGTERM: stopping after the step under way")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == -signal.SIGINT, "as by a kill: nothing is tidied up or saved"
    # Agents of a Ray that was killed try for a minute to tell its control service of it.
    assert run.left_behind(120.0) == []
    (left,) = run.temporary.glob("real-ray-*")  # nobody was there to remove it
    shutil.rmtree(left)

    status = run.command("status", "tiny")
    assert "running, last news" in status
    assert "--checkpoint.resume auto" in status
    checkpoints = sorted(run.path.glob("checkpoints/step_*"))
    step = int(checkpoints[-1].name.removeprefix("step_"))
    state = json.loads((checkpoints[-1] / "driver.json").read_text())
    buffered = {entry["group"]["sampled"]["uid"] for entry in state["buffered"]}
    before = run.metrics()
    assert 2 <= step < 8

    process = run.start(model, **changes)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert run.left_behind() == []
    assert f"continuing run tiny from step {step} ({checkpoints[-1]})" in out
    rows = run.metrics()
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert rows[:step] == before[:step]
    elapsed = [row["time/elapsed"] for row in rows]
    assert elapsed == sorted(elapsed)
    rates = [row["policy/learning_rate"] for row in rows]
    assert rates == sorted(set(rates), reverse=True), "the schedule has begun again"
    # As a run that nothing happened to: each prompt once, in its step.
    trained = [list(dict.fromkeys(s["uid"] for s in run.samples(n))) for n in range(1, 9)]
    assert trained == uids_in_order(model, num_steps=8)
    for later in range(step + 1, 9):
        for sample in run.samples(later):
            assert sample["uid"] in buffered or sample["oldest_version"] >= step, "old weights"
    events = read_rows(run.path / "events.jsonl")
    assert [e["text"] for e in events if e["kind"] == "resumed"] == [
        f"from step {step} ({checkpoints[-1]})"
    ]
    evaluated = [e["policy_version"] for e in events if e["kind"] == "evaluation"]
    assert sorted(set(evaluated)) == [0, 3, 6, 8]
    assert "accuracy on held-out prompts" in out
    groups = json.loads((run.path / "status.json").read_text())["groups"]
    assert groups["drawn"] == groups["trained"] == 16
    assert "finished" in run.command("status", "tiny")

    model_file = run.path / "model" / "model.safetensors"
    written = model_file.stat().st_mtime_ns
    assert "run tiny is finished" in run.command("train", "config.yaml")
    assert model_file.stat().st_mtime_ns == written
    assert len(run.metrics()) == 8
