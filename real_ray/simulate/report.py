"""What a simulation found, for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table

from real_ray.simulate.plan import PlanResult

_BAR = 30  # characters of a share of 1
_FULL = 0.8  # share from which more of something helps; where work comes in bursts, 1 is rare
_MAX_STALENESS = 8  # that rollout.max_staleness allows


@dataclass(frozen=True, slots=True)
class Limit:
    """What holds a run up, in a word and in a sentence."""

    word: str
    sentence: str


def limit(result: PlanResult) -> Limit:
    """Find the part that the others wait for."""
    if result.learner_waits_for_groups < 0.1:
        shares = {
            "training": result.learner_train,
            "weight sync": result.learner_waits_for_sync,
            "evaluation": result.learner_waits_for_evaluation,
        }
        word = max(shares, key=lambda name: shares[name])
        return Limit(
            word,
            f"{word} limits: {', '.join(f'{n} {share:.0%}' for n, share in shares.items())} of "
            f"the time, while {1 - result.slots_used:.0%} of the generators' slots are free",
        )
    waits = f"the learner waits for groups {result.learner_waits_for_groups:.0%} of the time"
    if result.rewards_busy >= max(_FULL, result.slots_used):
        return Limit(
            "rewards",
            f"scoring limits: {waits}, while the reward workers are busy "
            f"{result.rewards_busy:.0%} of it; a larger reward.num_workers helps",
        )
    if result.slots_used >= _FULL:
        return Limit(
            "generators",
            f"generation limits: {waits}, while {result.slots_used:.0%} of the generators' slots "
            "are in use; more or faster generators help",
        )
    helps = "rollout.straggler: evict against slow groups"
    if result.max_staleness < _MAX_STALENESS:
        helps = f"a larger rollout.max_staleness, or {helps},"
    return Limit(
        "pipeline",
        f"the pipeline limits: {waits}, while only {result.slots_used:.0%} of the generators' "
        f"slots are in use; {helps} helps most",
    )


def plan_name(num_generators: int, max_staleness: int) -> str:
    """A plan in words."""
    return f"{num_generators} generator{'s' * (num_generators > 1)}, max_staleness {max_staleness}"


def print_results(results: Sequence[PlanResult], console: Console) -> None:
    """Print a page for one plan, a table for several."""
    if len(results) == 1:
        console.print(_page(results[0]))
        console.print(f"{limit(results[0]).sentence}.", soft_wrap=True)
        return
    console.print(_comparison(results))
    fastest = min(results, key=lambda result: result.seconds_per_step)
    name = plan_name(fastest.num_generators, fastest.max_staleness)
    console.print(f"fastest: {name}. {limit(fastest).sentence}.", soft_wrap=True)


def _page(result: PlanResult) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="bold")
    table.add_column()
    hours = f"{result.seconds / 3600:.2f} virtual hours"
    table.add_row("steps", f"{result.num_steps} in {hours}, {result.seconds_per_step:.3g} s each")
    table.add_row(
        "throughput",
        f"{result.groups_per_second:.3g} groups/s, "
        f"{result.completions_per_second:.3g} completions/s",
    )
    table.add_row(
        "generators",
        f"{plan_name(result.num_generators, result.max_staleness)}: idle "
        f"{result.generators_idle:.1%}, paused for new weights {result.generators_paused:.1%}; "
        f"slots in use {result.slots_used:.1%}",
    )
    table.add_row("rewards", f"workers busy {result.rewards_busy:.1%}")
    table.add_row(
        "learner",
        f"trains {result.learner_train:.1%}, waits for groups "
        f"{result.learner_waits_for_groups:.1%}, for weight syncs "
        f"{result.learner_waits_for_sync:.1%}, for evaluations "
        f"{result.learner_waits_for_evaluation:.1%}",
    )
    table.add_row(
        "staleness",
        f"mean {result.staleness_mean:.2f}, max {max(result.staleness)}; share of groups:",
    )
    for versions, share in result.staleness.items():
        bar = "━" * round(_BAR * share)
        table.add_row("", f"{versions:>2} {share:>6.1%} {bar}")
    table.add_row(
        "buffer",
        f"{result.buffer_mean:.1f} complete groups at the end of a step, at most "
        f"{result.buffer_max}; none after {result.buffer_empty:.0%} of the steps",
    )
    table.add_row(
        "trouble",
        f"{result.stragglers} stragglers, {result.failed_generations} failed generations",
    )
    table.add_row("groups", ", ".join(f"{name} {n}" for name, n in result.ledger.items()))
    return table


def _comparison(results: Sequence[PlanResult]) -> Table:
    table = Table(box=box.SIMPLE, padding=(0, 1))
    rows = [_row(result) for result in results]
    for name in rows[0]:
        table.add_column(name, justify="left" if name == "limited by" else "right")
    for row in rows:
        table.add_row(*row.values())
    return table


def _row(result: PlanResult) -> dict[str, str]:
    return {
        "gene-\nrators": str(result.num_generators),
        "max\nstaleness": str(result.max_staleness),
        "seconds\na step": f"{result.seconds_per_step:.3g}",
        "groups\na second": f"{result.groups_per_second:.3g}",
        "generators\nidle": f"{result.generators_idle:.0%}",
        "slots\nin use": f"{result.slots_used:.0%}",
        "rewards\nbusy": f"{result.rewards_busy:.0%}",
        "learner\ntrains": f"{result.learner_train:.0%}",
        "waits for\ngroups": f"{result.learner_waits_for_groups:.0%}",
        "\nsync": f"{result.learner_waits_for_sync:.0%}",
        "\nevaluation": f"{result.learner_waits_for_evaluation:.0%}",
        "staleness\nmean": f"{result.staleness_mean:.2f}",
        "buffer\nmean": f"{result.buffer_mean:.1f}",
        "\nat 0": f"{result.buffer_empty:.0%}",
        "left\nout": str(sum(result.ledger[how] for how in ("filtered", "evicted", "failed"))),
        "limited by": limit(result).word,
    }
