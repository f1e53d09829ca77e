"""All losses as `PolicyLoss`, against float64 formulas in plain Python written here."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import fmean, stdev

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from loss_steps import Place, Step, flat, gradient, policy_share, split_steps, steps

from real_ray.config import LossConfig
from real_ray.errors import GroupError, RewardError
from real_ray.loss import build_loss, labels, real_metrics, two_sided

no_deadline = settings(deadline=None, max_examples=40)  # torch's first backward takes long

TAU = 0.4
CONFIGS = {
    "real": LossConfig(type="real", tau=TAU),
    "real, valid, group_mean": LossConfig(
        type="real", tau=TAU, group_denominator="valid", labels="group_mean"
    ),
    "real_bce": LossConfig(type="real_bce", tau=TAU),
    "real_bce, group_mean": LossConfig(type="real_bce", tau=TAU, labels="group_mean"),
    "grpo": LossConfig(type="grpo"),
    "dapo": LossConfig(type="dapo"),
    "gspo": LossConfig(type="gspo"),
    "gspo, wide": LossConfig(type="gspo", epsilon=0.1, epsilon_high=0.3),
}
CLIP = {"grpo": (0.2, 0.2), "dapo": (0.2, 0.28), "gspo": (3e-4, 4e-4), "gspo, wide": (0.1, 0.3)}
each_loss = pytest.mark.parametrize("name", CONFIGS)


def is_positive(step: Step, g: int, n: int, name: str) -> bool:
    bound = 0.0
    if "group_mean" in name:
        group = zip(step.rewards[g], step.included[g], strict=True)
        bound = fmean([r for r, included in group if included])
    return step.rewards[g][n] > bound


def classes(step: Step, name: str) -> list[tuple[list[float], list[float]]]:
    """Scores of the included positives and negatives of each group; none of a one-sided group."""
    result = []
    for g in range(len(step.rewards)):
        positives: list[float] = []
        negatives: list[float] = []
        for n, ratios in enumerate(step.ratios[g]):
            if step.included[g][n]:
                members = positives if is_positive(step, g, n, name) else negatives
                members.append(sum(ratios) / len(ratios))
        result.append((positives, negatives) if positives and negatives else ([], []))
    return result


def advantage(step: Step, g: int, n: int) -> float:
    rewards = [r for r, yes in zip(step.rewards[g], step.included[g], strict=True) if yes]
    if len(rewards) < 2:
        return 0.0
    return (step.rewards[g][n] - fmean(rewards)) / (stdev(rewards) + 1e-4)


def real_loss(step: Step, name: str) -> float:
    groups = classes(step, name)
    total = sum(
        math.log(1 + sum(math.exp(-s / TAU) for s in positives))
        + math.log(1 + sum(math.exp(s / TAU) for s in negatives))
        for positives, negatives in groups
    )
    valid = sum(bool(positives) for positives, _ in groups)
    return total / max(valid if "valid" in name else len(groups), 1)


def real_bce_loss(step: Step, name: str) -> float:
    losses = []
    for positives, negatives in classes(step, name):
        losses += [-math.log(1 / (1 + math.exp(-s / TAU))) for s in positives]
        losses += [-math.log(1 - 1 / (1 + math.exp(-s / TAU))) for s in negatives]
    return fmean(losses) if losses else 0.0


def clipped(log_ratio: float, a: float, name: str) -> float:
    low, high = CLIP[name]
    r = math.exp(log_ratio)
    return -min(r * a, min(max(r, 1 - low), 1 + high) * a)


def ratio_loss(step: Step, name: str) -> float:
    sequences: list[float] = []
    tokens: list[float] = []
    for g, n in step.places():
        if not step.included[g][n]:
            continue
        a, ratios = advantage(step, g, n), step.ratios[g][n]
        if name.startswith("gspo"):
            sequences.append(clipped(fmean(ratios), a, name))
        else:
            losses = [clipped(r, a, name) for r in ratios]
            sequences.append(fmean(losses))
            tokens += losses
    values = tokens if name == "dapo" else sequences
    return fmean(values) if values else 0.0


def reference(name: str) -> Callable[[Step, str], float]:
    if name.startswith("real_bce"):
        return real_bce_loss
    return real_loss if name.startswith("real") else ratio_loss


def far_from_the_kinks(step: Step, name: str) -> bool:
    """Whether no ratio is so close to its clip range that a difference quotient meets both."""
    means = [fmean(step.ratios[g][n]) for g, n in step.places()]
    bounds = [math.log1p(-CLIP[name][0]), math.log1p(CLIP[name][1])] if name in CLIP else []
    return all(abs(r - b) > 1e-5 for r in [*flat(step.ratios), *means] for b in bounds)


class TestFormula:
    @each_loss
    @no_deadline
    @given(step=steps())
    def test_value(self, name: str, step: Step) -> None:
        config = CONFIGS[name]
        _, metrics = gradient(policy_share(build_loss(config), step), step, [step.places()])
        if config.type == "real":
            assert metrics.values() == {}
            table = step.table()
            positive = labels(
                table.rewards, mode=config.labels, positive_above=0.0, included=table.included
            )
            metrics = real_metrics(
                step.scores(),
                positive,
                TAU,
                table.included,
                group_denominator=config.group_denominator,
            )
        value = metrics.values()["real/loss" if config.type == "real" else "loss/policy"]
        assert value == pytest.approx(reference(name)(step, name), rel=1e-9, abs=1e-12)

    @each_loss
    @no_deadline
    @given(step=steps(max_length=3))
    def test_gradient(self, name: str, step: Step) -> None:
        assume(far_from_the_kinks(step, name))
        share = policy_share(build_loss(CONFIGS[name]), step)
        actual, _ = gradient(share, step, [step.places()])
        h = 1e-6
        expected = [
            (
                reference(name)(step.with_ratio(token, h), name)
                - reference(name)(step.with_ratio(token, -h), name)
            )
            / (2 * h)
            for token in step.tokens()
        ]
        assert flat(actual) == pytest.approx(expected, rel=1e-6, abs=1e-7)


class TestParts:
    @each_loss
    @no_deadline
    @given(case=split_steps())
    def test_shares_of_parts_have_the_gradient_of_the_whole(
        self, name: str, case: tuple[Step, list[list[Place]]]
    ) -> None:
        step, parts = case
        share = policy_share(build_loss(CONFIGS[name]), step)
        whole, whole_metrics = gradient(share, step, [step.places()])
        split, split_metrics = gradient(share, step, parts)
        assert flat(split) == pytest.approx(flat(whole), rel=1e-12, abs=1e-15)
        assert split_metrics.values() == pytest.approx(whole_metrics.values(), abs=1e-12)

    @each_loss
    def test_a_part_without_members_is_zero_in_the_graph(self, name: str) -> None:
        step = Step(rewards=[[1, 0]], included=[[True, True]], ratios=[[[0.1], [0.2]]])
        members = step.members([])
        value, metrics = policy_share(build_loss(CONFIGS[name]), step)(members)
        value.backward()
        assert value.item() == 0.0
        assert members.logprobs.grad is not None
        assert metrics.values() == (
            {} if name.startswith("real,") or name == "real" else {"loss/policy": 0.0}
        )

    @each_loss
    def test_scores_are_used_for_the_groups_of_the_members_only_if_members_are_coupled(
        self, name: str
    ) -> None:
        step = Step(
            rewards=[[1, 0], [0, 1]], included=[[True] * 2] * 2, ratios=[[[1e-4], [0.0, 2e-4]]] * 2
        )
        loss = build_loss(CONFIGS[name])
        assert loss.couples_members == (CONFIGS[name].type == "real")
        scores = torch.full((2, 2), math.nan, dtype=torch.float64)
        if loss.couples_members:
            scores[1] = step.scores()[1]
        part = [[(1, 1), (1, 0)]]
        expected, _ = gradient(policy_share(loss, step), step, part)
        actual, _ = gradient(policy_share(loss, step, scores=scores), step, part)
        assert flat(actual) == flat(expected)
        assert all(flat(actual))


class TestExclusion:
    @each_loss
    @no_deadline
    @given(step=steps(), seed=st.integers(0, 2**16))
    def test_an_excluded_member_has_no_influence_and_no_gradient(
        self, name: str, step: Step, seed: int
    ) -> None:
        random = torch.Generator().manual_seed(seed)

        def other(value: float) -> float:
            return value + 3 * torch.randn((), generator=random, dtype=torch.float64).item()

        changed = Step(
            rewards=[list(group) for group in step.rewards],
            included=step.included,
            ratios=[[list(member) for member in group] for group in step.ratios],
        )
        for g, n in step.places():
            if not step.included[g][n]:
                changed.rewards[g][n] = other(step.rewards[g][n])
                changed.ratios[g][n] = [other(0.0), other(0.0), *step.ratios[g][n]]
        loss = build_loss(CONFIGS[name])
        before, metrics = gradient(policy_share(loss, step), step, [step.places()])
        after, new_metrics = gradient(policy_share(loss, changed), changed, [step.places()])
        for g, n in step.places():
            if step.included[g][n]:
                assert after[g][n] == pytest.approx(before[g][n], rel=1e-12, abs=1e-15)
            else:
                assert not any(after[g][n] + before[g][n])
        assert new_metrics.values() == pytest.approx(metrics.values(), abs=1e-12)

    @each_loss
    @pytest.mark.parametrize(
        ("rewards", "included"),
        [
            ([[1, 0, 1], [0, 1, 0]], [[False] * 3] * 2),  # nobody
            ([[1, 0, 1], [0, 1, 0]], [[True, False, False], [False, True, False]]),  # one each
            ([[1, 1, 1], [0, 0, 0]], [[True] * 3] * 2),  # one-sided
            ([[0.1, 0.1, 0.1], [0.7, 0.7, 0.7]], [[True] * 3] * 2),  # equal, with a rounded mean
            ([[1, 1, 0], [1, 0, 0]], [[True, True, False], [False, True, True]]),  # left one-sided
        ],
    )
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_nothing_to_train_on(
        self,
        name: str,
        rewards: list[list[float]],
        included: list[list[bool]],
        dtype: torch.dtype,
    ) -> None:
        ratios = [[[0.5, -0.5], [1.0], [200.0]], [[-1.0], [0.1], [0.2, 0.3, 0.1]]]
        step = Step(rewards=rewards, included=included, ratios=ratios)
        loss = build_loss(CONFIGS[name])
        actual, metrics = gradient(policy_share(loss, step, dtype), step, [step.places()], dtype)
        assert not any(flat(actual))
        assert metrics.values().get("loss/policy", 0.0) == 0.0
        assert not loss.weights(step.scores(dtype), step.table()).any()


class TestWeights:
    @each_loss
    @no_deadline
    @given(step=steps())
    def test_are_the_derivative_by_the_score_where_nothing_is_clipped(
        self, name: str, step: Step
    ) -> None:
        # All tokens of a member move together, by less than any clip range.
        ratios = [
            [[math.tanh(member[0]) * 2e-4] * len(member) for member in group]
            for group in step.ratios
        ]
        step = Step(rewards=step.rewards, included=step.included, ratios=ratios)
        loss, table = build_loss(CONFIGS[name]), step.table()
        gradients, _ = gradient(policy_share(loss, step), step, [step.places()])
        num_groups = len(step.rewards)
        if "valid" in name:
            positive = labels(
                table.rewards, mode="group_mean", positive_above=0.0, included=table.included
            )
            num_groups = int(two_sided(positive, table.included).sum())
        weights = loss.weights(step.scores(), table)
        assert not weights.requires_grad
        expected = [[sum(member) * num_groups for member in group] for group in gradients]
        torch.testing.assert_close(
            weights, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-12
        )

    @each_loss
    @pytest.mark.parametrize("score", [math.nan, math.inf, -1e4])
    def test_ignore_the_score_of_an_excluded_member(self, name: str, score: float) -> None:
        step = Step(
            rewards=[[1, 0, 1]], included=[[True, True, False]], ratios=[[[0.1], [0.2], [0.3]]]
        )
        scores = step.scores()
        expected = build_loss(CONFIGS[name]).weights(scores, step.table())
        scores[0, 2] = score
        weights = build_loss(CONFIGS[name]).weights(scores, step.table())
        assert torch.equal(weights, expected)
        assert (weights != 0).tolist() == [[True, True, False]]


class TestExtremes:
    @each_loss
    @no_deadline
    @given(
        step=steps(),
        magnitudes=st.lists(st.floats(0.0, 4.0), min_size=4, max_size=4),
        dtype=st.sampled_from([torch.float32, torch.float64]),
    )
    def test_finite_for_log_ratios_up_to_1e4(
        self, name: str, step: Step, magnitudes: list[float], dtype: torch.dtype
    ) -> None:
        ratios = [
            [[math.copysign(10 ** magnitudes[n % 4], r) for r in member] for n, member in pairs]
            for pairs in map(enumerate, step.ratios)
        ]
        step = Step(rewards=step.rewards, included=step.included, ratios=ratios)
        loss = build_loss(CONFIGS[name])
        actual, metrics = gradient(policy_share(loss, step, dtype), step, [step.places()], dtype)
        assert all(map(math.isfinite, [*flat(actual), *metrics.values().values()]))
        assert loss.weights(step.scores(dtype), step.table()).isfinite().all()

    @pytest.mark.parametrize("name", ["grpo", "dapo", "gspo"])
    def test_a_clipped_ratio_that_overflows_has_gradient_zero(self, name: str) -> None:
        step = Step(rewards=[[1, 0]], included=[[True, True]], ratios=[[[1e4], [-1e4]]])
        share = policy_share(build_loss(CONFIGS[name]), step, torch.float32)
        actual, metrics = gradient(share, step, [step.places()], torch.float32)
        assert flat(actual) == [0.0, 0.0]
        low, high = CLIP[name]
        a = 0.5 / (math.sqrt(0.5) + 1e-4)
        values = metrics.values()
        assert values["loss/policy"] == pytest.approx((1 - low - 1 - high) * a / 2, abs=1e-6)
        assert values["loss/clip_fraction"] == 1.0


class TestClipFraction:
    # A positive clips above, a negative below; the excluded and the equal ones never.
    STEP = Step(
        rewards=[[1, 0, 1, 0], [1, 1, 1, 1]],
        included=[[True, True, True, False], [True] * 4],
        ratios=[
            [[0.21, 0.5, -0.5], [0.5, -0.5], [0.1], [-0.5] * 5],
            [[0.5], [-0.5], [0.0], [0.0]],
        ],
    )

    @pytest.mark.parametrize(("name", "clipped"), [("grpo", 3), ("dapo", 2)])
    def test_counts_included_tokens(self, name: str, clipped: int) -> None:
        # log(1.2) = 0.18 and log(1.28) = 0.25, so 0.21 is clipped by grpo only.
        share = policy_share(build_loss(CONFIGS[name]), self.STEP)
        _, metrics = gradient(share, self.STEP, [self.STEP.places()])
        assert metrics.means == {"loss/clip_fraction": (clipped, 10)}

    def test_counts_included_completions(self) -> None:
        share = policy_share(build_loss(CONFIGS["gspo"]), self.STEP)
        _, metrics = gradient(share, self.STEP, [self.STEP.places()])
        assert metrics.means == {"loss/clip_fraction": (2, 7)}


V1 = [[0.2, 0.0], [-0.3, -0.1, -0.2], [0.5, 0.1, 0.3, 0.3], [-0.05]]
V6 = [[0.1], [-0.2], [0.3], [0.0]]
REAL = build_loss(LossConfig())


class TestVectorsOfReal:
    @pytest.mark.parametrize("parts", [1, 4])
    def test_token_gradients_of_v1(self, parts: int) -> None:
        step = Step(rewards=[[1, 1, 0, 0]], included=[[True] * 4], ratios=[V1])
        places = [step.places()[i::parts] for i in range(parts)]
        (actual,), _ = gradient(policy_share(REAL, step), step, places)
        expected = [-0.247309180, -0.300417804, 0.244451329, 0.485563750]
        for member, value in zip(actual, expected, strict=True):
            assert member == pytest.approx([value] * len(member), abs=1e-9)

    @pytest.mark.parametrize(("denominator", "groups"), [("all", 2), ("valid", 1)])
    def test_batch_of_v1_and_v6(self, denominator: str, groups: int) -> None:
        step = Step(
            rewards=[[1, 1, 0, 0], [1] * 4],
            included=[[True] * 4] * 2,
            ratios=[V1, V6],
        )
        config = LossConfig.model_validate({"group_denominator": denominator})
        actual, _ = gradient(policy_share(build_loss(config), step), step, [step.places()])
        assert sum(actual[0][0]) == pytest.approx(-0.494618360 / groups, abs=1e-9)
        assert flat([actual[1]]) == [0.0] * 4

    @pytest.mark.parametrize("reward", [0.0, 1.0])
    def test_v1_without_its_fourth_member(self, reward: float) -> None:
        step = Step(
            rewards=[[1, 1, 0, reward]],
            included=[[True, True, True, False]],
            ratios=[V1],
        )
        (actual,), _ = gradient(policy_share(REAL, step), step, [step.places()])
        # dL/ds of the lone negative: exp(s / tau) / (1 + exp(s / tau)) / tau.
        assert sum(actual[2]) == pytest.approx(2 / (1 + math.exp(-0.6)))
        assert actual[3] == [0.0]
        metrics = real_metrics(
            step.scores(),
            labels(step.table().rewards, positive_above=0.0),
            0.5,
            step.table().included,
        )
        assert metrics.values()["real/loss"] == pytest.approx(2.234603936, abs=1e-9)


@each_loss
def test_the_gradient_flows_through_the_policy_only(name: str) -> None:
    step = Step(rewards=[[1, 0]], included=[[True, True]], ratios=[[[0.1], [0.2, 0.1]]])
    members = step.members(step.places())
    members.old_logprobs.requires_grad_()
    value, _ = policy_share(build_loss(CONFIGS[name]), step)(members)
    value.backward()
    assert members.old_logprobs.grad is None


@each_loss
def test_bad_rewards_are_refused(name: str) -> None:
    loss = build_loss(CONFIGS[name])
    for rewards, error in (([[1.0, math.nan]], RewardError), ([[1.0]], GroupError)):
        step = Step(
            rewards=rewards, included=[[True] * len(rewards[0])], ratios=[[[0.1]] * len(rewards[0])]
        )
        with pytest.raises(error):
            policy_share(loss, step)(step.members(step.places()))
