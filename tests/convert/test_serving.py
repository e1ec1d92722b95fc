"""`transformers serve` on a saved student: what its server calls, and the server itself."""

from __future__ import annotations

import copy
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers import tiny_model, tiny_spec
from transformers import AutoConfig, AutoProcessor

from ltconvert.convert.checkpoint import save_student
from ltconvert.convert.students.lt2 import LT2ForCausalLM

QUESTION = [{"role": "user", "content": "What is it?"}]
NEW_TOKENS = 6
SERVING = all(find_spec(name) for name in ("fastapi", "uvicorn", "openai"))


@pytest.fixture(scope="module")
def student() -> LT2ForCausalLM:
    """A looped one with every kind of cache but the plain window's."""
    mixers = ["gdn_window", "full", "gdn"]
    return tiny_model(tiny_spec("ouro", num_loops=2), mixers, window_tokens=8)


@pytest.fixture(scope="module")
def folder(
    student: LT2ForCausalLM, tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    return save_student(student, tiny_tokenizer, tmp_path_factory.mktemp("served") / "student", {})


@pytest.fixture(scope="module")
def answer(student: LT2ForCausalLM, tiny_tokenizer: Any) -> str:
    """The likeliest tokens after the question, each by a forward pass over all before it."""
    ids = tiny_tokenizer.apply_chat_template(
        QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )["input_ids"]
    prompt = ids.shape[1]
    with torch.no_grad():
        for _ in range(NEW_TOKENS):
            ids = torch.cat([ids, student(ids).logits[:, -1:].argmax(-1)], dim=1)
    return tiny_tokenizer.decode(ids[0, prompt:], skip_special_tokens=True)


def test_the_calls_of_the_server(folder: Path, answer: str) -> None:
    """In the order and with the arguments of transformers.cli.serving (5.24)."""
    named: dict[str, Any] = {"revision": None, "trust_remote_code": True}
    options = {"attn_implementation": None, "dtype": "auto", "device_map": "cpu"}
    processor = AutoProcessor.from_pretrained(str(folder), **named)
    config = AutoConfig.from_pretrained(str(folder), **named, **options, tqdm_class=None)
    if hasattr(transformers, "AutoModelForDecision"):
        with pytest.raises(ValueError):
            transformers.AutoModelForDecision.from_pretrained(str(folder), **named, **options)
    architecture = getattr(transformers, config.architectures[0])
    model = architecture.from_pretrained(str(folder), **named, **options, tqdm_class=None)
    assert not hasattr(model, "init_continuous_batching")  # else it would be called
    inputs = processor.apply_chat_template(
        QUESTION,
        add_generation_prompt=True,
        tools=None,
        return_tensors="pt",
        return_dict=True,
        tokenize=True,
    ).to(model.device)
    settings = copy.deepcopy(model.generation_config)
    settings.max_new_tokens, settings.temperature, settings.do_sample = NEW_TOKENS, 0.0, False
    (ids,) = model.generate(**inputs, generation_config=settings, tokenizer=processor)
    new = ids[inputs["input_ids"].shape[-1] :]
    assert processor.decode(new, skip_special_tokens=True) == answer


def test_architectures_name_the_class_too(folder: Path) -> None:
    saved = json.loads((folder / "config.json").read_text())
    assert saved["architectures"] == ["AutoModelForCausalLM", "LT2ForCausalLM"]


def test_continuous_batching_is_refused_in_a_line(student: LT2ForCausalLM) -> None:
    for call in (student.generate_batch, student.continuous_batching_context_manager):
        with pytest.raises(ValueError, match=r"continuous batching is not supported by LT2"):
            call([[1, 2, 3]])


@pytest.mark.slow
@pytest.mark.skipif(not SERVING, reason="pip install transformers[serving]")
@pytest.mark.parametrize("options", [[], ["--continuous-batching"]], ids=["plain", "batching"])
def test_a_chat_with_the_server(
    folder: Path, answer: str, tmp_path: Path, options: list[str]
) -> None:
    """In a process of its own; with --continuous-batching it says that it does without."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    entry = "from transformers.cli.transformers import main; main()"
    where = ["--trust-remote-code", "--device", "cpu", "--port", str(port)]
    command = [sys.executable, "-c", entry, "serve", str(folder), *where, *options]
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ, cwd=tmp_path)
    try:
        _wait_for(server, port, tmp_path / "log")
        body = {"messages": QUESTION, "max_tokens": NEW_TOKENS, "temperature": 0}
        found = json.loads(_post(port, body))
        assert found["choices"][0]["message"]["content"] == answer
        lines = _post(port, body | {"stream": True}).split("\n\n")
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.strip()]
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert "".join(delta.get("content", "") for delta in deltas) == answer
    finally:
        server.terminate()
        server.wait(30)
    said = (tmp_path / "log").read_text()
    assert ("does not support continuous batching" in said) == bool(options)


def _wait_for(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    until = time.monotonic() + 120
    while time.monotonic() < until and server.poll() is None:
        try:
            urllib.request.urlopen(f"http://localhost:{port}/health", timeout=5).close()
            return
        except OSError:
            time.sleep(0.2)
    pytest.fail(log.read_text()[-2000:])


def _post(port: int, body: dict[str, Any]) -> str:
    request = urllib.request.Request(
        f"http://localhost:{port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        return reply.read().decode()
