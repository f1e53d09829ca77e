"""The documents say what the code does, and the examples work."""

from __future__ import annotations

import dataclasses
import json
import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from fakes import make_config, rollout_ticket
from learner_ranks import learner_group

from actors.protocol import TrainedBatch, TrainRequest
from real_ray.config import LossConfig, load_config
from real_ray.config.keys import keys_by_name, sections
from real_ray.ledger import Outcome
from real_ray.loss import GroupTable, Members, build_loss, kl_share, real_metrics
from real_ray.metrics import StepTimes, step_metrics
from real_ray.partial_metrics import PartialMetrics
from real_ray.policy import token_metrics
from real_ray.rewards import RewardFunction, load_reward
from real_ray.tracking import RunDirectory
from real_ray.tracking.jsonl import JsonlTracker
from real_ray.tracking.status import Status
from real_ray.types import SampleRecord, SyncReport

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
EXAMPLES = sorted(ROOT.glob("examples/*.yaml"))
METRICS = (ROOT / "docs" / "metrics.md").read_text()

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_KEY = re.compile(r"`(?:--)?([a-z]+)\.([a-z0-9_]+)(?:[ :=][^`]*)?`|--([a-z]+)\.([a-z0-9_]+)")
_PATH = re.compile(r"`((?:real_ray|actors|docs|examples|scripts|requirements)/[\w./-]*)`")
_FIRST_CELL = re.compile(r"^\| `([^`]+)` \|", re.MULTILINE)
_METRIC = re.compile(r'"([a-z]+/[a-z0-9_]+)"')
_EVENT = re.compile(r'\bevent(?:=|\(|,)\s*"([a-z ]+)"')
_STALENESS = re.compile(r"_staleness_\d+$")


def by_name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.fixture
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reward functions of the examples are found from the root of the repository."""
    monkeypatch.chdir(ROOT)


each_document = pytest.mark.parametrize("path", DOCUMENTS, ids=by_name)


def rows(document: str, heading: str) -> list[str]:
    """First cells, in code style, of all tables below a heading."""
    _, _, rest = document.partition(f"\n## {heading}\n")
    return _FIRST_CELL.findall(rest.partition("\n## ")[0])


def code() -> str:
    """All code of the product."""
    packages = [ROOT / "real_ray", ROOT / "actors"]
    return "\n".join(path.read_text() for package in packages for path in package.rglob("*.py"))


def yaml_blocks(path: Path) -> list[str]:
    return [code for language, code in _FENCE.findall(path.read_text()) if language == "yaml"]


def anchors(path: Path) -> set[str]:
    """Fragments that lead to a heading, as GitHub makes them."""
    headings = (re.sub(r"[^\w\s-]", "", h.lower()) for h in _HEADING.findall(path.read_text()))
    return {heading.strip().replace(" ", "-") for heading in headings}


class FakeRank:
    """One learner rank that has trained on a group with a positive and a negative."""

    def __init__(self) -> None:
        self.train = SimpleNamespace(remote=self._train)

    async def _train(self, request: TrainRequest, *groups: object) -> TrainedBatch:
        (step,) = request.steps
        table = GroupTable(
            rewards=torch.from_numpy(step.rewards),
            included=torch.from_numpy(step.included),
            num_tokens=torch.from_numpy(step.num_tokens),
        )
        scores, num_tokens = torch.zeros(table.rewards.shape), int(table.num_tokens.sum())
        tokens = torch.zeros(num_tokens)
        members = Members(
            logprobs=tokens,
            old_logprobs=tokens,
            row=torch.arange(2).repeat_interleave(table.num_tokens[0]),
            group=torch.zeros(2, dtype=torch.long),
            index=torch.arange(2),
        )
        # Every loss has the metrics of this one, or fewer.
        _, of_loss = build_loss(LossConfig(type="grpo")).share(members, table, scores)
        _, of_kl = kl_share(tokens, tokens, tokens == 0, num_tokens)
        of_step = _METRIC.findall((ROOT / "actors" / "train_batch.py").read_text())
        return TrainedBatch(
            metrics=PartialMetrics.merge(
                [
                    of_loss,
                    of_kl,
                    real_metrics(scores, table.rewards > 0, 0.5),
                    token_metrics(tokens, tokens, tokens, torch.arange(num_tokens)),
                    PartialMetrics(means=dict.fromkeys(of_step, (1.0, 1.0))),
                ]
            ),
            learning_rate=1e-6,
            samples=(),
            warnings=(),
        )


async def written_metrics(tmp_path: Path) -> dict[str, float]:
    """A line of metrics.jsonl, as a run writes it."""
    batch = [rollout_ticket("p:0@0")]
    config = make_config(learner={"prompts_per_step": 1})
    learner = learner_group([FakeRank()], config=config.learner, loss=config.loss)
    result = await learner.train(batch, policy_version=1)
    sync = SyncReport(
        policy_version=1,
        seconds=1.0,
        pause_seconds=1.0,
        num_generators=2,
        num_tensors=1,
        num_bytes=8,
        probe_difference=0.0,
    )
    run = RunDirectory(make_config(run={"output_dir": str(tmp_path)}))
    metrics = step_metrics(
        step=1,
        batch=batch,
        trained_version=0,
        result=result,
        sync=sync,
        ready=0,
        left=dict.fromkeys(Outcome, 0),
        times=StepTimes(began=0.0, saved=0.0, taken=1.0, trained=2.0, evaluated=2.0, ended=3.0),
    )
    JsonlTracker(run, samples=False).step(metrics, ())
    (line,) = run.metrics.read_text().splitlines()
    return json.loads(line)


class TestMetrics:
    async def test_exactly_the_written_metrics_are_explained(self, tmp_path: Path) -> None:
        explained = rows(METRICS, "metrics.jsonl")
        written = await written_metrics(tmp_path)
        assert sorted(explained) == sorted({_STALENESS.sub("_staleness_N", n) for n in written})

    def test_every_metric_that_the_code_names_is_explained(self) -> None:
        named = set(_METRIC.findall(code()))
        assert len(named) > 30
        assert [name for name in sorted(named) if f"`{name}`" not in METRICS] == []

    def test_exactly_the_events_that_the_code_names_are_explained(self) -> None:
        named = {
            *_EVENT.findall(code()),
            *(f"group {outcome.value}" for outcome in (Outcome.EVICTED, Outcome.FAILED)),
        }
        explained = rows(METRICS, "events.jsonl")
        assert sorted(named | {"policy_version", "eval/accuracy"}) == sorted(explained)

    def test_exactly_the_fields_of_a_sample_are_explained(self) -> None:
        fields = [field.name for field in dataclasses.fields(SampleRecord)]
        assert rows(METRICS, "samples") == fields

    def test_exactly_the_fields_of_the_status_are_explained(self) -> None:
        fields = {field.name for field in dataclasses.fields(Status)}
        outcomes = {outcome.value for outcome in Outcome}
        explained = set(rows(METRICS, "status.json"))
        assert explained - fields == outcomes | {"buffered", "training", "in flight"}
        assert fields - explained == set()

    def test_the_files_of_a_run_are_explained(self, tmp_path: Path) -> None:
        run = RunDirectory(make_config(run={"output_dir": str(tmp_path)}))
        written_later = {run.metrics, run.events, run.status, run.reward_curve}
        names = {path.name for path in {*run.path.iterdir(), *written_later}}
        table = METRICS.partition("\n## ")[0]
        assert names <= {cell.split("/")[0] for cell in _FIRST_CELL.findall(table)}


class TestConfiguration:
    def test_the_reference_is_up_to_date(self) -> None:
        script = runpy.run_path(str(ROOT / "scripts" / "write_config_reference.py"))
        written = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
        assert written == script["config_reference"](), (
            "run .venv/bin/python scripts/write_config_reference.py"
        )

    @each_document
    def test_every_key_that_is_named_exists(self, path: Path) -> None:
        named = {
            f"{a or c}.{b or d}"
            for a, b, c, d in _KEY.findall(path.read_text())
            if (a or c) in sections() and (b or d) not in {"py", "yaml", "md", "json"}
        }
        assert sorted(named - keys_by_name().keys()) == []

    @each_document
    def test_yaml_blocks_hold_keys_that_exist(self, path: Path) -> None:
        blocks = [yaml.safe_load(block) for block in yaml_blocks(path)]
        named = {f"{s}.{key}" for block in blocks for s, keys in block.items() for key in keys}
        assert sorted(named - keys_by_name().keys()) == []

    def test_whole_configs_in_the_documents_load(self, tmp_path: Path, at_root: None) -> None:
        blocks = [block for path in DOCUMENTS for block in yaml_blocks(path)]
        whole = [block for block in blocks if {"model", "data"} <= yaml.safe_load(block).keys()]
        assert whole, "the README has a whole config"
        for number, block in enumerate(whole):
            file = tmp_path / f"{number}.yaml"
            file.write_text(block)
            load_reward(load_config(file).reward.function)


class TestLinks:
    @each_document
    def test_relative_links_lead_somewhere(self, path: Path) -> None:
        text = _FENCE.sub("", path.read_text())
        broken = []
        for link in _LINK.findall(text):
            file, _, fragment = link.partition("#")
            target = path.parent / file if file else path
            if link.startswith(("http://", "https://")):
                continue
            if not target.exists() or (fragment and fragment not in anchors(target)):
                broken.append(link)
        assert broken == []

    @each_document
    def test_paths_that_are_named_exist(self, path: Path) -> None:
        named = set(_PATH.findall(path.read_text()))
        assert sorted(name for name in named if not (ROOT / name).exists()) == []


class TestExamples:
    @pytest.fixture
    def boxed_answer(self, at_root: None) -> RewardFunction:
        return load_reward("examples.boxed_answer:boxed_answer").function

    @pytest.mark.parametrize("path", EXAMPLES, ids=by_name)
    def test_configs_and_their_rewards_load(self, path: Path, at_root: None) -> None:
        load_reward(load_config(path).reward.function)

    @pytest.mark.parametrize(
        ("completion", "reward"),
        [
            (r"so \boxed{\frac{1}{2}}.", 1.0),
            (r"first \boxed{3}, no: \boxed{ \dfrac{1}{2} }", 1.0),
            (r"\boxed{\frac{1}{2}} or rather \boxed{3}", 0.0),
            (r"\boxed{\frac{1}{2}", 0.0),
            (r"\frac{1}{2}", 0.0),
            ("", 0.0),
        ],
    )
    def test_boxed_answer(
        self, boxed_answer: RewardFunction, completion: str, reward: float
    ) -> None:
        answer = r"We get $\boxed{\frac{1}{2}}$."
        assert boxed_answer([completion, "x"], prompt="", answer=answer, columns={}) == [reward, 0]

    def test_boxed_answer_needs_a_boxed_reference(self, boxed_answer: RewardFunction) -> None:
        with pytest.raises(ValueError, match="the answer column has no"):
            boxed_answer(["x"], prompt="", answer="42", columns={})
