"""Which bundles a run needs, and whether nodes hold them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from fakes import make_config
from hypothesis import example, given
from hypothesis import strategies as st

from real_ray.config import Config
from real_ray.errors import ResourceError
from real_ray.placement import (
    Bundle,
    Placement,
    check_fits,
    describe_shortage,
    plan_placement,
)

Node = dict[str, float]
# As a config may have them: in Ray's smallest part, so that sums of floats are not exact.
amounts = st.integers(1, 30).map(lambda tenths: tenths / 10)


def make_run(**overrides: dict[str, object]) -> Config:
    sections: dict[str, dict[str, object]] = {
        "rollout": {"num_generators": 2, "cpus_per_generator": 1.5, "tensor_parallel_size": 2},
        "learner": {"num_ranks": 3, "cpus_per_rank": 2.0},
        "reward": {"num_workers": 4, "cpus_per_worker": 0.25},
    }
    for name, section in overrides.items():
        sections[name] |= section
    return make_config(**sections)


def make_placement(bundles: Sequence[tuple[float, int]]) -> Placement:
    """Learner ranks of given CPUs and GPUs, with the smallest generator and reward worker."""
    return Placement(
        generators=(Bundle(actor="generator-0", cpus=0.1, gpus=0),),
        learner=tuple(
            Bundle(actor=f"learner-{i}", cpus=cpus, gpus=gpus)
            for i, (cpus, gpus) in enumerate(bundles)
        ),
        rewards=(Bundle(actor="reward-0", cpus=0.1, gpus=0),),
    )


def fits(placement: Placement, nodes: Sequence[Node]) -> bool:
    try:
        check_fits(placement, nodes)
    except ResourceError:
        return False
    return True


def fits_somehow(placement: Placement, nodes: Sequence[Node]) -> bool:
    """Try every node for every bundle, in tenths."""
    bundles = [(round(10 * b.cpus), b.gpus) for b in placement.bundles]
    for choice in itertools.product(range(len(nodes)), repeat=len(bundles)):
        for index, node in enumerate(nodes):
            mine = [b for b, chosen in zip(bundles, choice, strict=True) if chosen == index]
            if sum(c for c, _ in mine) > 10 * node["CPU"] or sum(g for _, g in mine) > node["GPU"]:
                break
        else:
            return True
    return False


class TestPlan:
    def test_a_bundle_for_each_actor(self) -> None:
        placement = plan_placement(make_run(), "cuda")
        assert [bundle.actor for bundle in placement.bundles] == [
            *("learner-0", "learner-1", "learner-2"),
            *("generator-0", "generator-1"),
            *("reward-0", "reward-1", "reward-2", "reward-3"),
        ]
        assert {b.actor: b.resources for b in placement.bundles if b.actor.endswith("1")} == {
            "learner-1": {"CPU": 2.0, "GPU": 1},
            "generator-1": {"CPU": 1.5, "GPU": 2},
            "reward-1": {"CPU": 0.25},
        }

    def test_nothing_asks_for_gpus_on_cpu(self) -> None:
        placement = plan_placement(make_run(), "cpu")
        assert all(set(bundle.resources) == {"CPU"} for bundle in placement.bundles)
        assert sum(bundle.cpus for bundle in placement.bundles) == 2 * 1.5 + 3 * 2 + 4 * 0.25


class TestFits:
    def test_exactly_what_is_needed_is_enough(self) -> None:
        check_fits(plan_placement(make_run(), "cuda"), [{"CPU": 10, "GPU": 7}])
        check_fits(plan_placement(make_run(), "cpu"), [{"CPU": 10}])
        check_fits(
            plan_placement(make_run(), "cuda"),
            [{"CPU": 4, "GPU": 3}, {"CPU": 5.5, "GPU": 4}, {"CPU": 0.5, "memory": 1e9}],
        )

    def test_fractions_add_up_as_people_count(self) -> None:
        parts = make_run(
            rollout={"num_generators": 1, "cpus_per_generator": 0.4},
            learner={"num_ranks": 1, "cpus_per_rank": 0.4},
            reward={"num_workers": 1, "cpus_per_worker": 0.2},
        )
        check_fits(plan_placement(parts, "cpu"), [{"CPU": 1.0}])

    @given(
        bundles=st.lists(st.tuples(amounts, st.integers(0, 2)), min_size=1, max_size=8),
        cpus=st.integers(1, 12),
        gpus=st.integers(0, 8),
    )
    def test_on_one_node_only_the_sums_count(
        self, bundles: list[tuple[float, int]], cpus: int, gpus: int
    ) -> None:
        placement = make_placement(bundles)
        tenths = sum(round(10 * cpus) for cpus, _ in bundles) + 2
        enough = tenths <= 10 * cpus and sum(gpus for _, gpus in bundles) <= gpus
        assert fits(placement, [{"CPU": cpus, "GPU": gpus}]) is enough

    @example(
        bundles=[(2.0, 0), (2.0, 0), (1.0, 0)], nodes=[{"CPU": 3, "GPU": 0}, {"CPU": 2, "GPU": 0}]
    )
    @given(
        bundles=st.lists(st.tuples(amounts, st.integers(0, 2)), min_size=1, max_size=3),
        nodes=st.lists(
            st.fixed_dictionaries({"CPU": st.integers(0, 4), "GPU": st.integers(0, 3)}),
            min_size=1,
            max_size=3,
        ),
    )
    def test_what_can_be_placed_is_never_refused(
        self, bundles: list[tuple[float, int]], nodes: list[Node]
    ) -> None:
        placement = make_placement(bundles)
        if fits_somehow(placement, nodes):
            assert fits(placement, nodes)


class TestRefusal:
    def test_too_few_cpus(self) -> None:
        with pytest.raises(ResourceError) as refused:
            check_fits(plan_placement(make_run(), "cpu"), [{"CPU": 4.0}, {"CPU": 5.5}])
        assert str(refused.value) == (
            "the run needs 10 CPUs, the cluster has 9.5: generators 2 x 1.5, learner ranks 3 x 2, "
            "reward workers 4 x 0.25. Lower rollout.cpus_per_generator, learner.cpus_per_rank, "
            "reward.cpus_per_worker or a count, or add nodes"
        )

    @pytest.mark.parametrize("nodes", [[{"CPU": 64.0, "GPU": 6.0}], [{"CPU": 64.0}], []])
    def test_too_few_gpus(self, nodes: list[Node]) -> None:
        there = sum(int(node.get("GPU", 0)) for node in nodes)
        with pytest.raises(ResourceError) as refused:
            check_fits(plan_placement(make_run(), "cuda"), nodes)
        assert str(refused.value) == (
            f"the run needs 7 GPUs, the cluster has {there}: generators 2 x 2, learner ranks 3 x "
            "1. Lower rollout.num_generators, rollout.tensor_parallel_size or learner.num_ranks, "
            "or add nodes"
        )

    def test_enough_in_total_but_not_on_one_node(self) -> None:
        config = make_run(rollout={"num_generators": 1, "tensor_parallel_size": 4})
        nodes = [{"CPU": 8.0, "GPU": 3.0}, {"CPU": 8.0, "GPU": 3.0}, {"CPU": 8.0, "GPU": 1.0}]
        with pytest.raises(ResourceError) as refused:
            check_fits(plan_placement(config, "cuda"), nodes)
        assert str(refused.value) == (
            "generator-0 needs 1.5 CPU, 4 GPU on one node, and no node has that; nodes: "
            "8 CPU, 3 GPU; 8 CPU, 3 GPU; 8 CPU, 1 GPU. Lower "
            "rollout.cpus_per_generator, rollout.tensor_parallel_size, learner.cpus_per_rank or "
            "reward.cpus_per_worker, or use larger nodes"
        )


class TestShortage:
    """Why a placement group waits, from what the nodes have and what is free on them."""

    def test_less_is_free_than_needed(self) -> None:
        text = describe_shortage(
            [{"CPU": 1.0, "GPU": 1.0}] * 3 + [{"CPU": 0.5}],
            total=[{"CPU": 8.0, "GPU": 4.0, "memory": 1e9}, {"CPU": 2.0}],
            free=[{"CPU": 7.5, "memory": 1e9}, {"CPU": 2.0}],
        )
        assert text == (
            "needs 3 x (1 CPU, 1 GPU), 0.5 CPU; the cluster has 10 CPU, 4 GPU, free are 9.5 CPU, "
            "0 GPU; short of GPU: 3 too few are free"
        )

    def test_more_is_needed_than_there_is(self) -> None:
        text = describe_shortage(
            [{"CPU": 1.5, "GPU": 8.0}], total=[{"CPU": 1.0, "GPU": 4.0}], free=[{"GPU": 1.0}]
        )
        assert text == (
            "needs 1.5 CPU, 8 GPU; the cluster has 1 CPU, 4 GPU, free are 0 CPU, 1 GPU; short of "
            "CPU: 0.5 more than there are, GPU: 4 more than there are"
        )

    def test_no_node_at_all(self) -> None:
        text = describe_shortage([{"CPU": 1.0}], total=[], free=[])
        assert text == (
            "needs 1 CPU; the cluster has nothing, free are 0 CPU; short of CPU: 1 more than there "
            "are"
        )

    @pytest.mark.parametrize(
        ("largest", "ending"),
        [
            (3.0, "short of one node with 4 GPU, which none has"),
            (4.0, "short of one node with 4 GPU, which none has free"),
        ],
    )
    def test_enough_but_not_on_one_node(self, largest: float, ending: str) -> None:
        text = describe_shortage(
            [{"GPU": 4.0}], total=[{"GPU": largest}] * 2, free=[{"GPU": 2.0}, {"GPU": 3.0}]
        )
        assert text.endswith(f"free are 5 GPU; {ending}")

    def test_enough_but_cut_up(self) -> None:
        text = describe_shortage(
            [{"GPU": 2.0}] * 2, total=[{"GPU": 4.0}] * 2, free=[{"GPU": 3.0}, {"GPU": 1.0}]
        )
        assert text.endswith(
            "enough is free in total, but on nodes that it does not fit on together"
        )
