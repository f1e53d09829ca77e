"""Which resources a run needs, and whether a cluster has them. Pure functions of plain numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from real_ray.config import Config
from real_ray.errors import ResourceError

Device = Literal["cpu", "cuda"]
_UNITS = 10_000  # Ray counts a resource in so many parts: sums of floats would be off by a hair


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """What one actor reserves on one node.

    Example: ``Bundle(actor="generator-0", cpus=1.0, gpus=0)``
    """

    actor: str
    cpus: float
    gpus: int

    @property
    def resources(self) -> dict[str, float]:
        """In the form that Ray takes."""
        return {"CPU": self.cpus} | ({"GPU": self.gpus} if self.gpus else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """All bundles of a run, one an actor."""

    generators: tuple[Bundle, ...]
    learner: tuple[Bundle, ...]
    rewards: tuple[Bundle, ...]

    @property
    def bundles(self) -> tuple[Bundle, ...]:
        return self.learner + self.generators + self.rewards


def plan_placement(config: Config, device: Device) -> Placement:
    """One bundle for each learner rank, reward worker and generator that a run begins with."""
    rollout, learner, reward = config.rollout, config.learner, config.reward
    cuda = device == "cuda"
    return Placement(
        generators=tuple(generator_bundle(config, device, i) for i in range(rollout.num_to_begin)),
        learner=tuple(
            Bundle(actor=f"learner-{i}", cpus=learner.cpus_per_rank, gpus=1 if cuda else 0)
            for i in range(learner.num_ranks)
        ),
        rewards=tuple(
            Bundle(actor=f"reward-{i}", cpus=reward.cpus_per_worker, gpus=0)
            for i in range(reward.num_workers)
        ),
    )


def generator_bundle(config: Config, device: Device, index: int) -> Bundle:
    """What the generator of this number reserves."""
    return Bundle(
        actor=f"generator-{index}",
        cpus=config.rollout.cpus_per_generator,
        gpus=config.rollout.tensor_parallel_size if device == "cuda" else 0,
    )


def check_fits(placement: Placement, nodes: Sequence[Mapping[str, float]]) -> None:
    """Check that the cluster is large enough, and that each bundle fits on some node.

    Args:
        nodes: for each node its resources, in Ray's names ("CPU", "GPU").

    Raises:
        ResourceError: naming the short resource, what is needed, what there is, and the keys that
            decide it.
    """
    for resource, keys in (
        ("GPU", "rollout.num_generators, rollout.tensor_parallel_size or learner.num_ranks"),
        (
            "CPU",
            "rollout.cpus_per_generator, learner.cpus_per_rank, reward.cpus_per_worker or a count",
        ),
    ):
        needed = sum(_units(bundle.resources).get(resource, 0) for bundle in placement.bundles)
        there = sum(_units(node).get(resource, 0) for node in nodes)
        if needed > there:
            raise ResourceError(
                f"the run needs {needed / _UNITS:g} {resource}s, the cluster has "
                f"{there / _UNITS:g}: "
                f"{_parts(placement, resource)}. Lower {keys}, or add nodes"
            )
    # More would be guessing how Ray packs; what it cannot place, it waits for, with a deadline.
    for bundle in placement.bundles:
        needs = _units(bundle.resources)
        if not any(_holds(_units(node), needs) for node in nodes):
            raise ResourceError(
                f"{bundle.actor} needs {_text(bundle.resources)} on one node, and no node has "
                f"that; nodes: {'; '.join(_text(n) for n in nodes)}. Lower "
                "rollout.cpus_per_generator, rollout.tensor_parallel_size, learner.cpus_per_rank "
                "or reward.cpus_per_worker, or use larger nodes"
            )


def describe_shortage(
    bundles: Sequence[Mapping[str, float]],
    *,
    total: Sequence[Mapping[str, float]],
    free: Sequence[Mapping[str, float]],
) -> str:
    """Why bundles that belong together are not placed now, in words.

    Args:
        bundles: resources of each bundle, in Ray's names.
        total: resources of each living node.
        free: of each node, what nobody has reserved.
    """
    is_free = _sum(free)
    of_these = ", ".join(f"{is_free.get(name, 0):g} {name}" for name in _sum(bundles))
    return (
        f"needs {_counted(bundles)}; the cluster has {_text(_sum(total))}, free are {of_these}; "
        f"{_reason(bundles, total=total, free=free)}"
    )


def _reason(
    bundles: Sequence[Mapping[str, float]],
    *,
    total: Sequence[Mapping[str, float]],
    free: Sequence[Mapping[str, float]],
) -> str:
    needed, has, has_free = (_units(_sum(some)) for some in (bundles, total, free))
    short = [name for name, amount in needed.items() if amount > has_free.get(name, 0)]
    if short:
        return "short of " + ", ".join(
            f"{name}: {(needed[name] - has_free.get(name, 0)) / _UNITS:g} too few are free"
            if needed[name] <= has.get(name, 0)
            else f"{name}: {(needed[name] - has.get(name, 0)) / _UNITS:g} more than there are"
            for name in short
        )
    for bundle in bundles:
        for nodes, has_it in ((total, "has"), (free, "has free")):
            if not any(_holds(_units(node), _units(bundle)) for node in nodes):
                return f"short of one node with {_text(bundle)}, which none {has_it}"
    return "enough is free in total, but on nodes that it does not fit on together"


def _counted(bundles: Sequence[Mapping[str, float]]) -> str:
    counts = Counter(_text(bundle) for bundle in bundles)
    return ", ".join(f"{count} x ({text})" if count > 1 else text for text, count in counts.items())


def _sum(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, int] = {}
    for part in parts:
        for name, amount in _units(part).items():
            total[name] = total.get(name, 0) + amount
    return {name: amount / _UNITS for name, amount in sorted(total.items())}  # Ray has no order


def _holds(node: Mapping[str, int], needs: Mapping[str, int]) -> bool:
    return all(node.get(name, 0) >= amount for name, amount in needs.items())


def _units(resources: Mapping[str, float]) -> dict[str, int]:
    return {name: round(amount * _UNITS) for name, amount in resources.items()}


def _parts(placement: Placement, resource: str) -> str:
    parts = []
    for name, bundles in (
        ("generators", placement.generators),
        ("learner ranks", placement.learner),
        ("reward workers", placement.rewards),
    ):
        each = bundles[0].resources.get(resource, 0)
        if each:
            parts.append(f"{name} {len(bundles)} x {each:g}")
    return ", ".join(parts)


def _text(resources: Mapping[str, float]) -> str:
    return (
        ", ".join(f"{resources[r]:g} {r}" for r in ("CPU", "GPU") if resources.get(r)) or "nothing"
    )
