"""real-ray: asynchronous reinforcement learning of language models with the REAL loss, on Ray."""

__version__ = "0.1.0"
