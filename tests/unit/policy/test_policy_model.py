"""A policy in any layout against the model's own logits, one plain sequence at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import transformers as hf
from groups import make_group
from tiny_sizes import SIZES, VOCABULARY
from torch import Tensor

from real_ray.batching import Layout, Microbatch, Slice
from real_ray.errors import ModelError
from real_ray.policy import Policy, lay_out, load_policy
from real_ray.types import RolloutGroup

CPU = torch.device("cpu")
TEMPERATURE = 0.6
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
CONFIG: dict[str, Any] = {
    **SIZES,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "qwen3": lambda: hf.Qwen3Config(**CONFIG, tie_word_embeddings=True),
    "llama": lambda: hf.LlamaConfig(**CONFIG, tie_word_embeddings=False),
    # A token sees 4 tokens, itself included.
    "mistral": lambda: hf.MistralConfig(**CONFIG, sliding_window=4),
    # Windows in some of the layers only.
    "gemma3": lambda: hf.Gemma3TextConfig(
        **CONFIG, sliding_window=3, layer_types=["sliding_attention", "full_attention"]
    ),
    "phi": lambda: hf.PhiConfig(  # a bias in the output layer
        **{k: v for k, v in CONFIG.items() if k != "head_dim"}, tie_word_embeddings=False
    ),
    "cohere": lambda: hf.CohereConfig(**CONFIG, logit_scale=0.25),
    "granite": lambda: hf.GraniteConfig(**CONFIG, logits_scaling=4.0),
    "hyperclovax": lambda: hf.HyperCLOVAXConfig(**CONFIG, logits_scaling=0.25),
}
GROUPS: dict[int, RolloutGroup] = {
    g: make_group(
        str(g),
        prompt_length=prompt_length,
        lengths=lengths,
        rewards=(1, 0, 0),
        vocab_size=VOCABULARY,
    )
    for g, (prompt_length, lengths) in enumerate([(9, (1, 7, 3)), (2, (5, 9, 1))])
}
MICROBATCH: Microbatch = (Slice(group=0, members=(0, 1, 2)), Slice(group=1, members=(0, 1)))


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Path]]:
    """Saves a small random model of a family, once."""
    made: dict[str, Path] = {}

    def directory(family: str) -> Path:
        if family not in made:
            with torch.random.fork_rng():
                torch.manual_seed(0)
                model = hf.AutoModelForCausalLM.from_config(CONFIGS[family]())
                for name, parameter in model.named_parameters():
                    if name.endswith("bias"):
                        torch.nn.init.normal_(parameter)
            made[family] = tmp_path_factory.mktemp(family)
            model.save_pretrained(made[family])
        return made[family]

    return directory


def plain_model(directory: Path) -> Any:
    return hf.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float64, attn_implementation="sdpa"
    )


def plain(model: Any) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of the micro-batch's tokens from the model's own logits."""
    logprobs, entropies = [], []
    for part in MICROBATCH:
        sampled = GROUPS[part.group].sampled
        prompt = torch.from_numpy(sampled.prompt.token_ids).long()
        for member in part.members:
            completion = torch.from_numpy(sampled.completions[member].token_ids).long()
            logits = model(input_ids=torch.cat([prompt, completion])[None], use_cache=False).logits
            distribution = (logits[0, len(prompt) - 1 : -1] / TEMPERATURE).log_softmax(dim=-1)
            logprobs.append(distribution.gather(-1, completion[:, None])[:, 0])
            entropies.append(-(distribution.exp() * distribution).sum(dim=-1))
    return torch.cat(logprobs), torch.cat(entropies)


def load(directory: Path, layout: Layout, dtype: torch.dtype = torch.float64) -> Policy:
    return load_policy(
        str(directory), dtype=dtype, packing=layout != "padded", trust_remote_code=False
    )


def run(policy: Policy, layout: Layout, microbatch: Microbatch = MICROBATCH) -> tuple[Any, Any]:
    inputs, _ = lay_out(microbatch, GROUPS, layout=layout, pad_token_id=0, device=CPU)
    logprobs, entropy = policy(inputs, TEMPERATURE)
    return logprobs, entropy


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", CONFIGS)
@torch.no_grad()
def test_every_layout_gives_what_the_model_itself_gives(
    family: str, layout: Layout, directories: Callable[[str], Path]
) -> None:
    expected, expected_entropy = plain(plain_model(directories(family)))
    logprobs, entropy = run(load(directories(family), layout), layout)
    # Some of the models compute norms and rotations in float32.
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(entropy, expected_entropy, rtol=0, atol=1e-4)
    assert expected.std() > 0.5, "all tokens are about equally likely: nothing was compared"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ["qwen3", "llama", "mistral", "phi"])
def test_every_layout_has_the_gradient_of_single_sequences(
    family: str, layout: Layout, directories: Callable[[str], Path]
) -> None:
    model = plain_model(directories(family))
    expected, _ = plain(model)
    weights = torch.linspace(-1, 2, len(expected), dtype=torch.float64)
    (expected * weights).sum().backward()
    policy = load(directories(family), layout)
    logprobs, entropy = run(policy, layout)
    assert not entropy.requires_grad
    (logprobs * weights).sum().backward()
    wanted = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    found = {name: p.grad for name, p in policy.model.named_parameters() if p.grad is not None}
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-3, msg=name)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_microbatch_without_slices_has_a_graph(
    layout: Layout, directories: Callable[[str], Path]
) -> None:
    policy = load(directories("qwen3"), layout)
    logprobs, _ = run(policy, layout, microbatch=())
    (0.0 * logprobs[:0].sum()).backward()
    gradients = [parameter.grad for parameter in policy.parameters()]
    assert all(gradient is not None and gradient.abs().sum() == 0 for gradient in gradients)


@torch.no_grad()
def test_log_probs_of_a_bfloat16_model_are_float32(directories: Callable[[str], Path]) -> None:
    directory = directories("qwen3")
    logprobs, entropy = run(load(directory, "packed", torch.bfloat16), "packed")
    assert logprobs.dtype == entropy.dtype == torch.float32
    # A bfloat16 logit of 2 to 4 is a multiple of 1/64, and so would differences of these be.
    assert (logprobs * 64).frac().abs().max() > 0.01
    expected, _ = plain(plain_model(directory))
    assert (logprobs.double() - expected).abs().mean() < 0.2


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (hf.Gemma2Config(**CONFIG, final_logit_softcapping=30.0), "final_logit_softcapping"),
        (
            hf.RecurrentGemmaConfig(**{k: v for k, v in CONFIG.items() if k != "head_dim"}),
            "logits_soft_cap",
        ),
    ],
    ids=["gemma2", "recurrent_gemma"],
)
def test_models_that_cap_their_logits_are_refused(config: Any, name: str) -> None:
    model = hf.AutoModelForCausalLM.from_config(config)
    with pytest.raises(ModelError, match=rf"{type(model).__name__} caps its logits \({name}\)"):
        Policy(model)


class TestLoadPolicy:
    def test_a_missing_directory(self, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match=f"^model {tmp_path / 'nowhere'}: "):
            load(tmp_path / "nowhere", "packed")

    def test_a_directory_without_a_model(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text("{}")
        with pytest.raises(ModelError, match=f"^model {tmp_path}: "):
            load(tmp_path, "padded")

    @pytest.mark.parametrize("kept", [0, 5, 0.5])
    def test_weights_that_were_cut_off(
        self, kept: float, directories: Callable[[str], Path], tmp_path: Path
    ) -> None:
        for file in directories("llama").iterdir():
            content = file.read_bytes()
            if file.suffix == ".safetensors":
                content = content[: int(len(content) * kept) if kept < 1 else int(kept)]
            (tmp_path / file.name).write_bytes(content)
        with pytest.raises(ModelError, match=f"^model {tmp_path}: "):
            load(tmp_path, "packed")

    @pytest.mark.parametrize(
        "config",
        [
            hf.FalconConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4),
            hf.BloomConfig(hidden_size=32, n_layer=1, n_head=4),
        ],
        ids=["falcon", "bloom"],
    )
    def test_attention_that_cannot_be_replaced(self, config: Any, tmp_path: Path) -> None:
        config.vocab_size = VOCABULARY
        hf.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
        with pytest.raises(ModelError, match=r"replaced.*set learner\.packing: false"):
            load(tmp_path, "shared_prefix")
