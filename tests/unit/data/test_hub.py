import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from real_ray.data.hub import explain_hub_error

ASK_FOR_ALL = """
import json
from real_ray.config.model import ModelConfig
from real_ray.data import load_tokenizer
from real_ray.data.sources import read_source
from real_ray.errors import UserError

messages = {}
for name in ("someone/gated", "someone/absent"):
    for kind in ("model", "dataset"):
        try:
            if kind == "model":
                load_tokenizer(ModelConfig(name_or_path=name))
            else:
                read_source(name, side="train", named_split="train", seed=0)
        except UserError as error:
            messages[f"{kind} {name}"] = str(error)
print(json.dumps(messages))
"""


class RefusingHub(BaseHTTPRequestHandler):
    """Answers as the hub does for a gated repository and for one that is not there."""

    def do_GET(self) -> None:
        status, code = (403, "GatedRepo") if "/gated" in self.path else (401, "RepoNotFound")
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def messages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """What a user reads, from a process of its own: the endpoint is fixed at import."""
    with ThreadingHTTPServer(("127.0.0.1", 0), RefusingHub) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            done = subprocess.run(
                [sys.executable, "-c", ASK_FOR_ALL],
                env={
                    "PATH": os.environ["PATH"],
                    "PYTHONPATH": str(Path(__file__).parents[3]),
                    "HF_HOME": str(tmp_path_factory.mktemp("hf")),
                    "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
                },
                capture_output=True,
                text=True,
                timeout=120,
                check=True,
            )
        finally:
            server.shutdown()
            thread.join()
        yield json.loads(done.stdout)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("model someone/gated", ["is gated", "https://huggingface.co/someone/gated", "HF_TOKEN"]),
        ("dataset someone/gated", ["is gated", "huggingface.co/datasets/someone/gated"]),
        ("model someone/absent", ["no public model of that name", "Check the spelling"]),
        ("dataset someone/absent", ["no public dataset of that name", "HF_TOKEN"]),
    ],
)
def test_what_the_hub_refuses_is_explained(
    messages: dict[str, str], name: str, parts: list[str]
) -> None:
    assert all(part in messages[name] for part in parts), messages[name]


def test_a_hub_out_of_reach_asks_for_a_download_beforehand() -> None:
    message = explain_hub_error("a/b", ConnectionError("no route to host"), kind="dataset")
    assert message is not None
    assert "hf download a/b --repo-type dataset" in message


def test_other_errors_are_not_explained_as_the_hubs() -> None:
    assert explain_hub_error("a/b", ValueError("propagated badly"), kind="model") is None
