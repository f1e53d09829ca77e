"""Loads the policy's tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from real_ray.config.model import ModelConfig
from real_ray.data.hub import explain_hub_error
from real_ray.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model")


def load_tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model directory or of a model on the hub.

    Raises:
        ModelError: the path does not exist or is no model directory, the hub has no such model or
            cannot be reached, the tokenizer cannot be loaded, or it has no chat template.
    """
    name = model.name_or_path
    path = Path(name).expanduser()
    if path.exists():
        _check_directory(path)
    elif name.startswith(("/", "./", "../", "~")):
        raise ModelError(
            f"model.name_or_path: {name} does not exist (looked in {Path.cwd()}). Give a "
            "directory written by save_pretrained, or a model name on the Hugging Face hub"
        )

    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(path) if path.exists() else name, trust_remote_code=model.trust_remote_code
        )
    except Exception as error:  # also the types of the hub, of tokenizers and of remote code
        raise ModelError(_explain(error, name=name, on_hub=not path.exists())) from error
    if not tokenizer.chat_template:
        raise ModelError(
            f"model {name}: its tokenizer has no chat template, so prompts cannot be formatted. "
            "Use an instruction-tuned model, or put a chat_template.jinja into the model directory"
        )
    return tokenizer


def _check_directory(path: Path) -> None:
    if not path.is_dir():
        raise ModelError(
            f"model.name_or_path: {path} is a file; give the directory written by save_pretrained"
        )
    missing = []
    if not (path / "config.json").is_file():
        missing.append("config.json")
    if not any(file for pattern in _TOKENIZER_FILES for file in path.glob(pattern)):
        missing.append("tokenizer.json")
    if missing:
        raise ModelError(
            f"model.name_or_path: {path} is not a complete Hugging Face model directory: "
            f"{' and '.join(missing)} missing. Write model and tokenizer there with save_pretrained"
        )


def _explain(error: Exception, *, name: str, on_hub: bool) -> str:
    if on_hub and (message := explain_hub_error(name, error, kind="model")):
        return message
    if "trust_remote_code" in str(error):
        return (
            f"model {name} ships Python code that must run to load it; if you trust it, set "
            "model.trust_remote_code: true"
        )
    return f"model {name}: its tokenizer cannot be loaded: {type(error).__name__}: {error}"
