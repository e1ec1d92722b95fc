"""Documents as token ids, closed by one separator token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ltconvert.distill.data.documents import Document
from ltconvert.errors import UserError, first_line

# What base models were pretrained to see between documents. An instruct tokenizer's eos often is
# the end of a turn instead (SmolLM2: `<|im_end|>`), so these names come first.
_SEPARATORS = ("<|endoftext|>", "<|end_of_text|>", "<eos>", "</s>")


class Encoder:
    """A tokenizer with its separator, and its beginning-of-text token if it puts one itself."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.separator = separator_id(tokenizer)
        self._bos = tokenizer.bos_token_id if starts_with_bos(tokenizer) else None

    def encode(self, documents: Sequence[Document]) -> list[np.ndarray]:
        """Token ids of every document, int64, the separator last."""
        if not documents:
            return []
        texts = [_readable(self.render(document)) for document in documents]
        encoded = self._tokenizer(
            texts,
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,  # no warning about the model's length: rows are cut later
        )["input_ids"]
        return [self._close(ids) for ids in encoded]

    def render(self, document: Document) -> str:
        """The text that is encoded: a chat in the tokenizer's template.

        Raises:
            UserError: there is no template, or it refuses the chat.
        """
        if isinstance(document.content, str):
            return document.content
        if not getattr(self._tokenizer, "chat_template", None):
            raise UserError(
                "the data holds chats, but the teacher's tokenizer has no chat template; "
                "use a text data set, or a teacher with a template"
            )
        try:
            return self._tokenizer.apply_chat_template(document.content, tokenize=False)
        except Exception as error:
            raise UserError(
                f"{document.place or 'a chat'}: the teacher's chat template refuses this chat "
                f"({first_line(error)}); mend or delete it"
            ) from error

    def _close(self, ids: list[int]) -> np.ndarray:
        if self._bos is not None and (not ids or ids[0] != self._bos):
            ids = [self._bos, *ids]
        return np.array([*ids, self.separator], np.int64)


def _readable(text: str) -> str:
    """The text, halves of a character (lone surrogates, which JSON may hold) replaced."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def starts_with_bos(tokenizer: Any) -> bool:
    """Whether the tokenizer puts its beginning-of-text token before a text (Gemma, Llama)."""
    bos = getattr(tokenizer, "bos_token_id", None)
    return bos is not None and list(tokenizer("a")["input_ids"])[:1] == [bos]


def separator_id(tokenizer: Any) -> int:
    """Id of the token that stands between documents: the base vocabulary's end of text.

    Raises:
        UserError: the tokenizer knows none.
    """
    vocabulary = tokenizer.get_vocab()
    for name in _SEPARATORS:
        if name in vocabulary:
            return vocabulary[name]
    if tokenizer.eos_token_id is None:
        names = ", ".join(_SEPARATORS)
        raise UserError(f"the tokenizer has no end-of-text token (looked for eos, {names})")
    return tokenizer.eos_token_id
