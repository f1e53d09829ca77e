"""Training on one batch, on one learner rank: the passes of each optimiser step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from actors.bad_steps import BadSteps
from actors.protocol import LearnerSpec, OptimiserStep, TrainedBatch, TrainRequest
from actors.requests import layout_of
from actors.zero import StepOutcome, optimizer_step, poison_unless_finite
from real_ray.batching import Microbatch, check_groups
from real_ray.loss import GroupTable, Members, build_loss, kl_share, labels, real_metrics
from real_ray.partial_metrics import PartialMetrics
from real_ray.policy import CompletionTokens, PolicyInput, lay_out, token_metrics
from real_ray.types import RolloutGroup, SampleRecord

PolicyCall = Callable[[PolicyInput, float], tuple[Tensor, Tensor]]


class BatchTrainer:
    """Runs the optimiser steps of a batch on a DeepSpeed engine. All ranks call it together.

    The gradient is that of the loss of all groups of an optimiser step on one process, however the
    members are spread over micro-batches and ranks. That is possible because the share of a
    micro-batch depends on members elsewhere through their scores alone (`PolicyLoss`)::

        cut groups only:   all but the first micro-batch -> log-probs, no graph -> scores
        all micro-batches: log-probs -> share of the loss, by the scores -> backward
        at the end:        optimiser step, or none if the gradient is not finite

    Before the first backward pass the ranks add up the scores of cut groups. Groups without a
    gradient, as those of one class, have log-probs for the metrics, but no graph and no backward.

    Args:
        engine: around a `Policy`.
        reference: the frozen policy of the KL term, called without gradient; None: no KL term.
    """

    def __init__(
        self, spec: LearnerSpec, engine: Any, *, reference: PolicyCall | None, pad_token_id: int
    ) -> None:
        self._spec = spec
        self._engine = engine
        self._reference = reference
        self._pad_token_id = pad_token_id
        self._device = torch.device(spec.device)
        self._loss = build_loss(spec.loss)
        self._bad_steps = BadSteps(
            spec.run_directory, rank=spec.rank, allowed_in_a_row=spec.config.max_bad_steps
        )

    def train(self, request: TrainRequest, groups: Sequence[RolloutGroup]) -> TrainedBatch:
        """Do the optimiser steps of a batch.

        Args:
            groups: those of which this rank has members, in the order of ``request.positions``.

        Raises:
            GroupError: a group is not fit to be trained on.
            LearnerError: `learner.max_bad_steps` steps in a row had no finite gradient.
        """
        check_groups(groups)
        runs = [_StepRun(step=step, groups={}) for step in request.steps]
        for position, group in zip(request.positions, groups, strict=True):
            runs[position.step].groups[position.group] = group
        if self._spec.loss.old_logprobs != "behaviour":
            # pi_old is the policy at the start of the batch. The first step meets it itself.
            for run in runs[1:]:
                self._record_proximal(run)
        metrics: list[PartialMetrics] = []
        samples: list[SampleRecord] = []
        warnings: list[str] = []
        for index, run in enumerate(runs):
            learning_rate = float(self._engine.get_lr()[0])
            version = request.policy_version - 1 if index == 0 else None
            part, scores, outcome = self._optimise(run, policy_version=version)
            records = self._records(run, scores)
            metrics.append(part)
            samples += records
            warnings += self._bad_steps.after(
                outcome, request.policy_version, index, records, run.groups.values()
            )
        return TrainedBatch(
            metrics=PartialMetrics.average(metrics),
            learning_rate=learning_rate,
            samples=tuple(samples),
            warnings=tuple(warnings),
        )

    def _optimise(
        self, run: _StepRun, *, policy_version: int | None
    ) -> tuple[PartialMetrics, Tensor, StepOutcome]:
        """One optimiser step.

        Args:
            policy_version: of the policy, if the batch has not changed it yet.

        Returns:
            Metrics of this rank's part, the scores [G, N] of all members, and what became of it.
        """
        step, table = run.step, self._table(run.step)
        known = self._scores_beforehand(run)
        scores = torch.zeros_like(known)
        is_whole = torch.ones(len(known), dtype=torch.bool, device=self._device)
        is_whole[list(step.cut)] = False
        parts: list[PartialMetrics] = []

        def run_forward(microbatch: Microbatch) -> _Forward:
            forward = self._forward(microbatch, run, self._reference)
            members = forward.members
            scores[members.group, members.index] = members.scores().detach()
            if policy_version is not None:
                parts.append(forward.token_metrics(policy_version))
            return forward

        for index, (microbatch, idle) in enumerate(self._passes(run)):
            self._engine.set_gradient_accumulation_boundary(index == len(step.microbatches) - 1)
            idle_loss = torch.zeros(())
            if idle:
                with torch.no_grad():
                    members = run_forward(idle).members
                    idle_loss, part = self._loss.share(members, table, known)
                parts.append(part)
            forward = run_forward(microbatch)
            members = forward.members
            found = scores[members.group, members.index]
            if index == 0:
                known[members.group, members.index] = found
                if self._needs_scores(step):
                    dist.all_reduce(known)  # each member is on one rank
            else:
                whole = is_whole[members.group]
                known[members.group[whole], members.index[whole]] = found[whole]
            loss, part = self._loss.share(members, table, known)
            parts.append(part)
            if forward.reference_logprobs is not None:
                divergence, part = kl_share(
                    members.logprobs,
                    forward.reference_logprobs,
                    members.of(table.included)[members.row],
                    num_tokens=int(table.num_tokens[table.included].sum()),
                )
                loss = loss + self._spec.loss.beta * divergence
                parts.append(part)
            # DeepSpeed averages the gradients of the ranks; here they add up.
            loss = poison_unless_finite((loss + idle_loss) * self._spec.world_size)
            self._engine.backward(loss, scale_wrt_gas=False)
        outcome = optimizer_step(self._engine)
        dist.all_reduce(scores)  # each member is on one rank
        if self._spec.rank == 0:
            parts.append(self._step_metrics(run.step, table, scores, outcome))
        return PartialMetrics.merge(parts), scores, outcome

    def _passes(self, run: _StepRun) -> list[tuple[Microbatch, Microbatch]]:
        """Each micro-batch in two: slices with a gradient, and slices of groups without one."""
        step, spec = run.step, self._spec
        # The KL term has a gradient everywhere. Under ZeRO-3 all ranks run equally many passes.
        if spec.loss.beta > 0 or (spec.config.zero_stage == 3 and spec.world_size > 1):
            return [(microbatch, ()) for microbatch in step.microbatches]
        scores = torch.zeros(step.rewards.shape, device=self._device)
        trains = (self._loss.weights(scores, self._table(step)) != 0).any(dim=1).tolist()
        return [
            (
                tuple(part for part in microbatch if trains[part.group]),
                tuple(part for part in microbatch if not trains[part.group]),
            )
            for microbatch in step.microbatches
        ]

    def _needs_scores(self, step: OptimiserStep) -> bool:
        """Whether a share of the loss depends on scores of other micro-batches."""
        return self._loss.couples_members and bool(step.cut)

    @torch.no_grad()
    def _scores_beforehand(self, run: _StepRun) -> Tensor:
        """[G, N] scores of this rank's members of cut groups that are not in its first micro-batch.

        The first runs later and only once, as its graph may wait for the scores.
        """
        scores = torch.zeros(run.step.rewards.shape, device=self._device)
        if self._needs_scores(run.step):
            for microbatch in run.step.score_passes:
                members = self._forward(microbatch, run, reference=None).members
                scores[members.group, members.index] = members.scores()
        return scores

    @torch.no_grad()
    def _record_proximal(self, run: _StepRun) -> None:
        """Keep the log-probs of a step's completion tokens under the current policy."""
        for microbatch, idle in self._passes(run):
            for chosen in (microbatch, idle) if idle else (microbatch,):
                inputs, tokens = self._lay_out(chosen, run)
                logprobs, _ = self._engine(inputs, self._spec.temperature)
                run.proximal[chosen] = logprobs[: len(tokens.row)]

    def _forward(
        self, microbatch: Microbatch, run: _StepRun, reference: PolicyCall | None
    ) -> _Forward:
        inputs, tokens = self._lay_out(microbatch, run)
        # A micro-batch without slices only keeps this rank in step with the others. Its one token
        # belongs to no member; what is left of it is empty, but has a graph.
        count = len(tokens.row)
        reference_logprobs = None
        if reference is not None:
            with torch.no_grad():
                reference_logprobs = reference(inputs, self._spec.temperature)[0][:count]
        logprobs, entropy = (
            values[:count] for values in self._engine(inputs, self._spec.temperature)
        )
        return _Forward(
            tokens=tokens,
            entropy=entropy,
            reference_logprobs=reference_logprobs,
            members=Members(
                logprobs=logprobs,
                old_logprobs=self._old_logprobs(logprobs, tokens, run.proximal.get(microbatch)),
                row=tokens.row,
                group=tokens.group,
                index=tokens.index,
            ),
        )

    def _lay_out(
        self, microbatch: Microbatch, run: _StepRun
    ) -> tuple[PolicyInput, CompletionTokens]:
        return lay_out(
            microbatch,
            run.groups,
            layout=layout_of(self._spec.config),
            pad_token_id=self._pad_token_id,
            device=self._device,
        )

    def _old_logprobs(
        self, logprobs: Tensor, tokens: CompletionTokens, proximal: Tensor | None
    ) -> Tensor:
        """pi_old of the tokens of a micro-batch: [T], without a graph."""
        proximal = logprobs.detach() if proximal is None else proximal
        match self._spec.loss.old_logprobs:
            case "behaviour":
                return tokens.generator_logprobs
            case "proximal":
                return proximal
            case "blend":
                # Mean log-ratio to the proximal policy, plus lambda times that from it to the
                # generator's; the second has no gradient.
                return torch.lerp(proximal, tokens.generator_logprobs, self._spec.loss.blend_lambda)

    def _table(self, step: OptimiserStep) -> GroupTable:
        return GroupTable(
            rewards=torch.from_numpy(step.rewards).to(self._device),
            included=torch.from_numpy(step.included).to(self._device),
            num_tokens=torch.from_numpy(step.num_tokens).to(self._device),
        )

    def _labels(self, table: GroupTable) -> Tensor:
        loss = self._spec.loss
        return labels(
            table.rewards,
            mode=loss.labels,
            positive_above=loss.positive_above,
            included=table.included,
        )

    def _step_metrics(
        self, step: OptimiserStep, table: GroupTable, scores: Tensor, outcome: StepOutcome
    ) -> PartialMetrics:
        """What is known of the whole step, for one rank to report."""
        loss = self._spec.loss
        return PartialMetrics.merge(
            [
                real_metrics(
                    scores,
                    self._labels(table),
                    loss.tau,
                    table.included,
                    group_denominator=loss.group_denominator,
                ),
                PartialMetrics(
                    means={
                        "policy/grad_norm": (outcome.grad_norm, 1.0),
                        "learner/microbatches": (float(len(step.microbatches)), 1.0),
                        "learner/score_passes": (
                            float(len(step.score_passes)) if self._needs_scores(step) else 0.0,
                            1.0,
                        ),
                        "learner/skipped": (float(not outcome.applied), 1.0),
                    }
                ),
            ]
        )

    def _records(self, run: _StepRun, scores: Tensor) -> list[SampleRecord]:
        """A record of each of this rank's members."""
        table = self._table(run.step)
        weights = self._loss.weights(scores, table).tolist()
        positive = self._labels(table).tolist()
        return [
            SampleRecord(
                uid=run.groups[part.group].uid,
                index=member,
                prompt=run.groups[part.group].sampled.prompt.text,
                completion=completion.text,
                answer=run.groups[part.group].sampled.prompt.answer,
                reward=float(run.groups[part.group].rewards[member]),
                label=int(positive[part.group][member])
                if run.step.included[part.group, member]
                else None,
                score=float(scores[part.group, member]),
                weight=weights[part.group][member],
                oldest_version=completion.oldest_version,
                newest_version=completion.newest_version,
                num_tokens=len(completion.token_ids),
                finish_reason=completion.finish_reason,
            )
            for microbatch in run.step.microbatches
            for part in microbatch
            for member in part.members
            for completion in [run.groups[part.group].sampled.completions[member]]
        ]


@dataclass(slots=True, kw_only=True)
class _StepRun:
    """An optimiser step and this rank's groups in it."""

    step: OptimiserStep
    groups: dict[int, RolloutGroup]
    proximal: dict[Microbatch, Tensor] = field(default_factory=dict)  # [T] where recorded


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Forward:
    """One forward pass."""

    tokens: CompletionTokens
    members: Members
    entropy: Tensor  # [T]
    reference_logprobs: Tensor | None  # [T]

    def token_metrics(self, policy_version: int) -> PartialMetrics:
        return token_metrics(
            self.members.logprobs,
            self.tokens.generator_logprobs,
            self.entropy,
            policy_version - self.tokens.version,
        )
