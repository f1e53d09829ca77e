"""Prompts and answers: where they come from, how they are tokenized, in which order they go."""

from real_ray.data.cursor import Draw, PromptCursor
from real_ray.data.prompts import load_prompts
from real_ray.data.tokenizer import load_tokenizer

__all__ = ["Draw", "PromptCursor", "load_prompts", "load_tokenizer"]
