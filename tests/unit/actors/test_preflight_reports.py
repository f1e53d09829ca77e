"""Which versions agree, and which reports are those of an autoscaler; without Ray."""

from __future__ import annotations

import pytest

from actors.preflight import adds_nodes, compare_versions, installed_versions
from real_ray.errors import ResourceError

HERE = {"Python": "3.11.7", "ray": "2.60.0", "torch": "2.13.0+cpu", "vllm": "0.32.0"}


def test_builds_of_one_version_agree_and_roles_need_not_have_all() -> None:
    compare_versions(
        HERE,
        {
            "node a": HERE,
            "node b": {**HERE, "torch": "2.13.0+cu129"},
            "node c": {"Python": "3.11.7", "ray": "2.60.0"},
        },
    )
    compare_versions({"Python": "3.11.7", "ray": "2.60.0"}, {"node a": HERE})


@pytest.mark.parametrize(
    ("package", "version"),
    [
        ("Python", "3.11.8"),
        ("ray", "2.60.0rc1"),
        ("torch", "2.13.1+cpu"),
        ("vllm", "0.32.0.post1"),
    ],
)
def test_another_version_is_refused(package: str, version: str) -> None:
    with pytest.raises(ResourceError) as refused:
        compare_versions(HERE, {"node a": HERE, "node b": {**HERE, package: version}})
    assert str(refused.value) == (
        f"versions differ in the cluster: node b has {package} {version}, the driver has "
        f"{HERE[package]}. Install the same versions on all nodes and where you submit "
        "(requirements/), or use one container image"
    )


def test_all_differences_are_named() -> None:
    nodes = {"node a": {**HERE, "ray": "2.59.0"}, "node b": {**HERE, "vllm": "0.31.0"}}
    with pytest.raises(ResourceError, match=r"node a has ray 2\.59\.0.*; node b has vllm 0\.31\.0"):
        compare_versions(HERE, nodes)


def test_vllm_is_found_under_either_name() -> None:
    assert installed_versions().keys() == HERE.keys()


@pytest.mark.parametrize(
    ("node_types", "adds"),
    [
        ({"12c4": "node_12c4", "77ab": "node_77ab"}, False),  # as Ray makes them up
        ({"12c4": "node_12c4", "77ab": "ray.worker.gpu"}, True),
        ({"10.0.0.7": "head-group"}, True),
        ({}, False),
        (None, False),
    ],
)
def test_types_that_are_not_made_up_tell_of_an_autoscaler(
    node_types: dict[str, str] | None, adds: bool
) -> None:
    assert adds_nodes({"node_type_mapping": node_types}) is adds
