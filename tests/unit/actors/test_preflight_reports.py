"""Which versions agree, and which reports are those of an autoscaler; without Ray."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from ray.exceptions import NodeDiedError, RayError, RayTaskError, WorkerCrashedError

from actors import preflight
from actors.preflight import adds_nodes, check_versions, compare_versions, installed_versions
from real_ray.errors import ResourceError, RunError

HERE = {
    "Python": "3.11.7",
    "ray": "2.60.0",
    "torch": "2.13.0+cpu",
    "vllm": "0.32.0",
    "real-ray": "0.1.0",
}


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
        ("real-ray", "0.2.0"),
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


class FakeRay:
    """Two nodes, of which "b" does what a test says when it is asked for its versions.

    Args:
        answer: raised, or None: none comes.
        dies: "b" is not there any more after it was asked.
    """

    def __init__(self, answer: RayError | None, *, dies: bool) -> None:
        self._answer, self._dies = answer, dies
        self._asked: list[str] = []

    def nodes(self) -> list[dict[str, Any]]:
        alive = {"a": True, "b": not (self._dies and "b" in self._asked)}
        return [
            {"NodeID": n, "NodeManagerAddress": f"10.0.0.{n}", "Alive": alive[n]} for n in alive
        ]

    def remote(self, _: Any) -> Any:
        return self

    def options(self, *, scheduling_strategy: Any, **_: Any) -> Any:
        node: str = scheduling_strategy

        class Ask:
            def remote(ask) -> str:  # noqa: N805
                self._asked.append(node)
                return node

        return Ask()

    def wait(self, refs: Sequence[str], **_: Any) -> tuple[list[str], list[str]]:
        late = [ref for ref in refs if ref == "b" and self._answer is None]
        return [ref for ref in refs if ref not in late], late

    def get(self, ref: str) -> Any:
        if ref == "b" and self._answer is not None:
            raise self._answer
        return installed_versions()


NOT_INSTALLED = RayTaskError("f", "No module named 'actors'", ImportError("actors"))
DIED = NodeDiedError("the node died")


@pytest.mark.parametrize(
    ("answer", "dies", "only", "error", "text"),
    [
        (NOT_INSTALLED, False, None, ResourceError, r"b \(b\).*Install real-ray there"),
        (NOT_INSTALLED, False, "b", ResourceError, "Install real-ray there"),
        (WorkerCrashedError(), False, None, ResourceError, "a worker process ended there"),
        (WorkerCrashedError(), False, "b", RunError, "a worker process ended there"),
        (DIED, True, None, None, ""),
        (DIED, True, "b", RunError, r"node 10\.0\.0\.b \(b\) died"),
        (None, True, None, None, ""),
        (None, True, "b", RunError, "did not tell its versions within 5 s"),
        (None, False, None, ResourceError, "did not tell its versions within 5 s"),
        (None, False, "b", RunError, "did not tell its versions within 5 s"),
        (None, False, "c", RunError, "node c has left the cluster"),
    ],
)
def test_nodes_that_do_not_tell(
    monkeypatch: pytest.MonkeyPatch,
    *,
    answer: RayError | None,
    dies: bool,
    only: str | None,
    error: type[Exception] | None,
    text: str,
) -> None:
    """What is wrong with the installation ends a run; what is wrong with one node need not."""
    monkeypatch.setattr(preflight, "ray", FakeRay(answer, dies=dies))
    monkeypatch.setattr(preflight, "NodeAffinitySchedulingStrategy", lambda node, **_: node)
    monkeypatch.setattr(preflight, "_SOON_S", 0.0)
    if error is None:
        check_versions(timeout_s=5, only=only)
        return
    with pytest.raises(error, match=text):
        check_versions(timeout_s=5, only=only)
