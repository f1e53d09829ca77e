import json
import sys
from pathlib import Path

import huggingface_hub
import pytest
import tiny_model

from real_ray.config.model import ModelConfig
from real_ray.data import load_tokenizer
from real_ray.errors import ModelError


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """A model directory as far as the tokenizer is concerned."""
    tiny_model.build_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen3"}')
    return tmp_path / "model"


def load(name: Path | str) -> object:
    return load_tokenizer(ModelConfig(name_or_path=str(name)))


def test_a_model_directory_gives_its_tokenizer(model_dir: Path) -> None:
    tokenizer = load_tokenizer(ModelConfig(name_or_path=str(model_dir)))
    assert tokenizer.decode(tokenizer.encode("8 + 9 =\n 17")) == "8 + 9 =\n 17"
    assert tokenizer.chat_template


def test_a_missing_path_is_not_looked_up_on_the_hub() -> None:
    for name in ("/no/such/model", "./no-model", "~/no-model-here"):
        with pytest.raises(ModelError, match=rf"{name} does not exist \(looked in"):
            load(name)


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json"])
def test_an_incomplete_directory_names_the_missing_file(model_dir: Path, missing: str) -> None:
    (model_dir / missing).unlink()
    (model_dir / "tokenizer_config.json").unlink()
    with pytest.raises(ModelError, match=rf"directory: {missing} missing"):
        load(model_dir)


def test_a_file_is_not_a_model_directory(model_dir: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json is a file; give the directory"):
        load(model_dir / "config.json")


def test_a_tokenizer_without_chat_template_is_refused(model_dir: Path) -> None:
    (model_dir / "chat_template.jinja").unlink()
    with pytest.raises(ModelError, match=r"no chat template.*chat_template\.jinja"):
        load(model_dir)


def test_a_broken_tokenizer_file_is_reported_with_the_librarys_words(model_dir: Path) -> None:
    (model_dir / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"its tokenizer cannot be loaded: .+: .+"):
        load(model_dir)


def test_code_of_the_model_runs_only_if_asked_for(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Where transformers copies such code to, and how it is found there.
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "m"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    config = json.loads((model_dir / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (model_dir / "tokenizer_config.json").write_text(json.dumps(config))
    (model_dir / "config.json").write_text('{"model_type": "own"}')
    (model_dir / "own.py").write_text("raise RuntimeError('code of the model ran')")
    with pytest.raises(ModelError, match=r"set model\.trust_remote_code: true"):
        load(model_dir)
    with pytest.raises(ModelError, match="code of the model ran"):
        load_tokenizer(ModelConfig(name_or_path=str(model_dir), trust_remote_code=True))


def test_a_name_that_the_hub_cannot_have_is_a_missing_directory() -> None:
    with pytest.raises(ModelError, match="no such directory here, and it cannot be a name on the"):
        load("models/tiny/final")


def test_offline_says_how_to_download_beforehand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match=r"HF_HUB_OFFLINE.* run `hf download someone/model`"):
        load("someone/model")
