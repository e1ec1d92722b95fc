"""`ltconvert generate`: text from a student or a teacher, shown as it comes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from io import TextIOWrapper
from typing import TYPE_CHECKING, Any

from ltconvert import cli_output as output
from ltconvert.cli_models import student_folder
from ltconvert.errors import UserError, out_of_memory

if TYPE_CHECKING:
    from torch import Tensor

    from ltconvert.cli_session import Session
    from ltconvert.convert.students.cache import LoopCache
    from ltconvert.convert.teachers.load import Teacher

    Continue = Callable[[Any], list[int]]  # a streamer or None -> new token ids


@dataclass(frozen=True)
class Prompt:
    """What the model reads: a text, or a chat of one user message."""

    text: str
    chat: bool = False
    system: str | None = None

    def ids(self, tokenizer: Any) -> list[int]:
        """Token ids, special ones included.

        Raises:
            UserError: nothing to read, what is not UTF-8, or a chat is wanted and there is no
                template.
        """
        for name, text in (("prompt", self.text), ("--system", self.system or "")):
            try:
                text.encode()  # bytes of the shell's that are no text are lone surrogates by now
            except UnicodeEncodeError:
                raise UserError(f"the {name} is not UTF-8; convert it first") from None
        if not self.chat:
            ids = list(tokenizer(self.text)["input_ids"])
            if not ids:
                raise UserError("the prompt is empty; give a text with --prompt")
            return ids
        if not tokenizer.chat_template:
            raise UserError("this model has no chat template; leave out --chat and --system")
        messages = [{"role": "system", "content": self.system}] if self.system else []
        messages.append({"role": "user", "content": self.text})
        rendered = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        return list(tokenizer(rendered, add_special_tokens=False)["input_ids"])


def read(text: str) -> str:
    """The text, or what comes on stdin for ``-``, undecodable bytes as lone surrogates."""
    if text != "-":
        return text
    return TextIOWrapper(sys.stdin.buffer, encoding="utf-8", errors="surrogateescape").read()


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen; temperature 0 takes the likeliest.

    Attributes:
        exit_threshold: loops end at this exit probability; None: all are run.
        loop_cache: whose keys loops look at, see ``students/shared_cache.py``.
    """

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    beams: int = 1
    seed: int = 0
    exit_threshold: float | None = None
    loop_cache: str = "own"

    def options(self) -> dict[str, Any]:
        """Arguments of transformers' `generate`."""
        options: dict[str, Any] = {
            "max_new_tokens": self.max_new_tokens,
            "num_beams": self.beams,
            "repetition_penalty": self.repetition_penalty,
            "do_sample": self.temperature > 0,
            "exit_threshold": self.exit_threshold,
        }
        if self.temperature > 0:
            options |= {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        return options


def run(
    session: Session,
    reference: str,
    prompt: Prompt,
    sampling: Sampling,
    *,
    fast: bool = False,
    depths: int | None = None,
) -> None:
    """Load the model, continue the prompt, print the text (with `--json` a document).

    Args:
        depths: how often the layer of a Dreamer runs; None: as often as it was trained to.

    Raises:
        UserError: nothing to read, beam search is asked of the fast path, depths of a model that is
            no Dreamer, or too little memory.
    """
    import torch
    from transformers import TextStreamer

    from ltconvert.convert.students.dreamer.depths import set_depths

    if fast and sampling.beams > 1:
        raise UserError("--fast follows one continuation; leave out --fast or --beams")
    model = load(session, reference)
    if depths is not None and (line := set_depths(model.model, depths)):
        output.print_note(line)
    ids = prompt.ids(model.tokenizer)
    most, limit = len(ids) + sampling.max_new_tokens, model.spec.max_position_embeddings
    if most > limit:
        output.print_note(f"up to {most:,} tokens, and the model is made for {limit:,}")
    streamer = None
    if not session.json and sampling.beams == 1:
        streamer = TextStreamer(model.tokenizer, skip_prompt=True, skip_special_tokens=True)
    input_ids = torch.tensor([ids], device=model.model.device)
    try:
        go_on, cache = (_fast if fast else _plain)(model, input_ids, sampling)
        began = time.perf_counter()
        new_ids = go_on(streamer)
    except Exception as error:
        if not out_of_memory(error):
            raise
        raise UserError(
            f"out of memory with {most:,} tokens; lower --max-new-tokens or shorten the prompt"
        ) from error
    seconds = time.perf_counter() - began
    text = model.tokenizer.decode(new_ids, skip_special_tokens=True)
    loops = cache.loops / cache.steps if cache.steps else None
    if session.json:
        facts = {"prompt_tokens": len(ids), "new_tokens": len(new_ids), "seconds": seconds}
        facts |= {} if loops is None else {"loops": loops}
        output.print_json({"text": text, **facts})
        return
    if streamer is None:
        output.print_line(text)
    if session.verbose:
        speed = len(new_ids) / max(seconds, 1e-9)
        output.print_note(f"{len(new_ids)} tokens in {seconds:.1f} s, {speed:.1f} a second")
        if loops is not None:
            output.print_note(
                f"{loops:.2f} of {model.spec.num_loops} loops a token behind the prompt"
            )


def _plain(model: Teacher, input_ids: Tensor, sampling: Sampling) -> tuple[Continue, LoopCache]:
    """transformers' own loop, and the cache that it is going to fill."""
    import torch

    from ltconvert.convert.students.lt2_base import CACHE_NAME

    cache = model.model.new_cache(sampling.loop_cache)

    def go_on(streamer: Any) -> list[int]:
        torch.manual_seed(sampling.seed)
        with torch.inference_mode():
            sequence = model.model.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                streamer=streamer,
                pad_token_id=model.tokenizer.pad_token_id,
                **{CACHE_NAME: cache},
                **sampling.options(),
            )[0]
        return sequence[input_ids.shape[1] :].tolist()

    return go_on, cache


def _fast(model: Teacher, input_ids: Tensor, sampling: Sampling) -> tuple[Continue, LoopCache]:
    """A static cache, and on a GPU a CUDA graph, which is captured here."""
    from ltconvert.convert.decoding import Decoder
    from ltconvert.convert.sampling import Sampling as Choice

    choice = Choice(
        sampling.temperature, sampling.top_k, sampling.top_p, sampling.repetition_penalty
    )
    new = sampling.max_new_tokens
    decoder = Decoder(
        model.model,
        1,
        input_ids.shape[1] + new,
        exit_threshold=sampling.exit_threshold,
        loop_cache=sampling.loop_cache,
    )
    decoder.prepare(choice)

    def go_on(streamer: Any) -> list[int]:
        found: list[int] = []
        if streamer is not None:
            streamer.put(input_ids.cpu())  # which it skips
        for tokens_1n in decoder.stream(
            input_ids, max_new_tokens=new, sampling=choice, seed=sampling.seed
        ):
            found += tokens_1n[0].tolist()
            for token_1 in tokens_1n[0].split(1) if streamer is not None else ():
                streamer.put(token_1)
        if streamer is not None:
            streamer.end()
        return found

    return go_on, decoder.cache


def load(session: Session, reference: str) -> Teacher:
    """A student folder, the student of a run folder, or a teacher, ready to generate.

    Raises:
        UserError: it cannot be loaded, or has no tokenizer.
    """
    import torch

    from ltconvert.convert.teachers.load import load_teacher

    device = session.device()
    session.choose_kernels(device)
    precision, _ = session.precision(device)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    model = load_teacher(student_folder(reference), dtype=dtype, device=device)
    if model.tokenizer is None:
        raise UserError(f"{reference} comes without a tokenizer, so it cannot read a prompt")
    return model
