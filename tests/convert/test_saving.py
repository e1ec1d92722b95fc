"""Saved students in the hands of transformers alone: saved again, by a Trainer, with tokenizers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from helpers import tiny_model, tiny_spec, tokens
from transformers import (
    AutoModelForCausalLM,
    GemmaTokenizer,
    GPT2Tokenizer,
    LlamaTokenizer,
    Qwen2Tokenizer,
    Trainer,
    TrainingArguments,
)

from ltconvert.convert.checkpoint import save_student
from ltconvert.convert.students.lt2 import LT2ForCausalLM

TEXT = "the 3 cats, then"
WORDS = ["<unk>", "<s>", "</s>", "<pad>", "<bos>", "<eos>", "<mask>", "<|endoftext|>"]
MERGES = [("t", "h"), ("th", "e"), ("c", "a")]
VOCAB = {
    piece: i for i, piece in enumerate([*WORDS, *"\u2581\u0120 abcehnst3,", *map("".join, MERGES)])
}
# The classes that checkpoints of the teachers' families name; the fifth is `tiny_tokenizer`'s.
TOKENIZERS = (LlamaTokenizer, Qwen2Tokenizer, GemmaTokenizer, GPT2Tokenizer)
QUIET = os.environ | {"TQDM_DISABLE": "1"}


def tiny() -> LT2ForCausalLM:
    return tiny_model(tiny_spec("ouro", num_loops=2), ["gdn", "full", "window"])


def fresh(code: str, *arguments: str | Path) -> str:
    """What a new process says that gets no answer to questions, both streams in one."""
    command = [sys.executable, "-P", "-c", code, *map(str, arguments)]
    result = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=QUIET,
    )
    assert result.returncode == 0, result.stdout
    return result.stdout


def test_a_model_saved_by_others_loads_in_a_fresh_process(tmp_path: Path) -> None:
    """Loaded by AutoModel and saved again, also by a Trainer; and one that we never saved."""
    save_student(tiny(), None, tmp_path / "ours", {})
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", trust_remote_code=True)
    again.save_pretrained(tmp_path / "again")
    Trainer(again, TrainingArguments(tmp_path / "trainer", use_cpu=True)).save_model()
    pools = {"entries": 3, "experts": 6, "slices": 2, "top_experts": 3}
    dreamer = tiny_model(tiny_spec("qwen3"), dreamer=pools)
    dreamer.save_pretrained(tmp_path / "dreamer")
    ids, models = tokens(1, 9), {"again": again, "trainer": again, "dreamer": dreamer}
    for name, model in models.items():
        with torch.no_grad():
            torch.save((ids, model(ids).logits), tmp_path / name / "expected.pt")
        saved = json.loads((tmp_path / name / "config.json").read_text())
        # What `transformers serve` looks up, too.
        assert saved["architectures"] == ["AutoModelForCausalLM", "LT2ForCausalLM"]
    code = (
        "import sys, torch; from transformers import AutoModelForCausalLM\n"
        "for folder in sys.argv[1:]:\n"
        "    m = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)\n"
        "    ids, expected = torch.load(folder + '/expected.pt')\n"
        "    with torch.no_grad(): torch.testing.assert_close(m(ids).logits, expected)\n"
    )
    assert fresh(code, *(tmp_path / name for name in models)) == ""


def test_a_config_saved_alone_has_what_it_names(tmp_path: Path) -> None:
    config = tiny().config
    config.save_pretrained(tmp_path / "new" / "folder")
    assert (tmp_path / "new" / "folder" / "lt2_student.py").is_file()


def test_tokenizers_load_as_quietly_as_the_model(tmp_path: Path, tiny_tokenizer: Any) -> None:
    """By files alone, with the flag that the model needs, and then without it; classes stay."""
    made = [kind(vocab=VOCAB, merges=MERGES) for kind in TOKENIZERS]
    folders = []
    for tokenizer in (*made, tiny_tokenizer):
        folders.append(tmp_path / type(tokenizer).__name__)
        save_student(tiny(), tokenizer, folders[-1], {})
    code = (
        "import sys; from transformers import AutoTokenizer, PreTrainedTokenizerFast\n"
        "text, *folders = sys.argv[1:]\n"
        "for folder in folders:\n"
        "    print(PreTrainedTokenizerFast.from_pretrained(folder)(text)['input_ids'])\n"
        "for trust in ({'trust_remote_code': True}, {}):\n"
        "    for folder in folders:\n"
        "        t = AutoTokenizer.from_pretrained(folder, **trust)\n"
        "        print(type(t).__name__, t(text)['input_ids'])\n"
    )
    ids = [str(t(TEXT)["input_ids"]) for t in (*made, tiny_tokenizer)]
    named = [f"{folder.name} {found}" for folder, found in zip(folders, ids, strict=True)]
    assert fresh(code, TEXT, *folders).splitlines() == ids + named * 2
