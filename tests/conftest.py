"""Set-up of every test: no network, caches of their own, Hugging Face's `kernels` not shadowed."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from glob import glob
from pathlib import Path

# All of this has to stand before the first import of a Hugging Face package.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
_HF_HOME = tempfile.TemporaryDirectory(prefix="ltconvert-tests-", ignore_cleanup_errors=True)
os.environ["HF_HOME"] = _HF_HOME.name
os.environ.setdefault("OMP_NUM_THREADS", "1")
if not glob("/dev/nvidia[0-9]*"):  # torch is not imported yet, and Triton reads this once
    os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels then run on the CPU, in fp32
# Subprocesses that a test starts must not pick up the checkout's `kernels` folder either.
os.environ["PYTHONSAFEPATH"] = "1"

_TESTS = Path(__file__).resolve().parent
# With the root on sys.path a bare `import kernels` (transformers does that) would find ours.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != _TESTS.parent]
if str(_TESTS) not in sys.path:
    sys.path.append(str(_TESTS))  # for `import helpers`

import pytest  # noqa: E402
import torch  # noqa: E402
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)

_CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(autouse=True)
def _alike() -> Iterator[None]:
    """Every test starts from one seed, whatever ran before it, and leaves no mode behind."""
    torch.manual_seed(0)
    yield
    assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
    assert torch.get_default_device().type == "cpu"


@pytest.fixture(scope="session")
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE of 97 tokens: `<|endoftext|>` 0, `<|im_start|>` 1, `<|im_end|>` 2 (eos).

    The letters, digits and punctuation of plain English, one merge; other bytes are dropped.
    The special tokens stand where SmolLM2's do, and a chat template of its form is set.
    """
    text = "".join(chr(c) for c in range(32, 127) if chr(c) not in "`^~") + "\n"
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(vocab_size=97, special_tokens=specials, show_progress=False)
    core.train_from_iterator([text], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        additional_special_tokens=["<|endoftext|>"],
    )
    tokenizer.chat_template = _CHAT_TEMPLATE
    return tokenizer
