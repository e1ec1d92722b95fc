"""What a document is, and which split it belongs to."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ltconvert.errors import UserError
from ltconvert.recipes.data import DataSettings

Split = Literal["train", "heldout"]
Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Document:
    """One document: running text, or a chat as a list of {role, content} messages.

    ``place`` is where a chat stands, for messages: file and line, or data set and record.
    """

    content: str | Messages
    heldout: bool
    place: str = field(default="", compare=False)

    @property
    def text(self) -> str:
        """The text; for a chat its contents, one after the other, without any template."""
        if isinstance(self.content, str):
            return self.content
        return "\n\n".join(str(message.get("content") or "") for message in self.content)

    def in_split(self, split: Split) -> bool:
        """Whether the document belongs to `split`."""
        return self.heldout == (split == "heldout")


def is_heldout(key: str, share: float) -> bool:
    """Whether a document goes to the held-out split: a hash of its text, as a number in [0, 1).

    So the split depends on nothing but the text: not on the order, nor on the file it stands in,
    and copies of one document never stand on both sides.
    """
    digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


def text_document(text: str, share: float) -> Document | None:
    """A document of running text; None when it is blank."""
    return Document(text, is_heldout(text, share)) if text.strip() else None


def record_document(
    record: Mapping[str, Any], settings: DataSettings, place: str
) -> Document | None:
    """A document out of one record of a data set; None when it holds no text.

    Raises:
        UserError: neither field is there, or it holds something else than a text or a chat; names
            the place.
    """
    share = settings.heldout_share
    messages = record.get(settings.messages_field)
    if messages:
        chat = _checked_chat(messages, settings, place)
        return Document(chat, is_heldout(json.dumps(chat, sort_keys=True), share), place)
    if settings.text_field not in record:
        if settings.messages_field in record:
            return None
        raise missing_field(record.keys(), settings, place)
    text = record[settings.text_field]
    if text is None:
        return None
    if not isinstance(text, str):
        raise UserError(
            f"{place}: field {settings.text_field!r} holds a {type(text).__name__}, "
            "but a text is needed; set data.text_field to a field of texts"
        )
    return text_document(text, share)


def missing_field(fields: Any, settings: DataSettings, place: str) -> UserError:
    """The error for a record without text, which names the fields that are there."""
    there = ", ".join(sorted(map(str, fields))) or "none"
    return UserError(
        f"{place}: neither a field {settings.text_field!r} nor {settings.messages_field!r} "
        f"(fields there: {there}); set data.text_field or data.messages_field to one of them"
    )


def _checked_chat(messages: Any, settings: DataSettings, place: str) -> Messages:
    whole = isinstance(messages, list) and all(isinstance(each, Mapping) for each in messages)
    if not whole:
        raise UserError(
            f"{place}: field {settings.messages_field!r} is not a list of messages "
            'like {"role": "user", "content": "..."}'
        )
    return [
        _checked_message(message, f"{place}, message {number}")
        for number, message in enumerate(messages, 1)
    ]


def _checked_message(message: Mapping[str, Any], place: str) -> dict[str, Any]:
    """The message with a text as content; only one that calls tools may do without."""
    checked = dict(message)
    if isinstance(checked.get("content"), list):
        checked["content"] = _joined_parts(checked["content"], place)
    wordless = checked.get("content") is None and checked.get("tool_calls")
    for name in ("role",) if wordless else ("role", "content"):
        value = checked.get(name)
        if not isinstance(value, str):
            found = f"is a {type(value).__name__}" if value is not None else "is missing or null"
            raise UserError(f"{place}: {name!r} {found}, but a text is needed; mend or delete it")
    return checked


def _joined_parts(parts: list[Any], place: str) -> str:
    """The text of a content in parts, [{"type": "text", "text": ...}, ...], nothing in between."""
    texts = []
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        text = part.get("text") if kind == "text" else None
        if not isinstance(text, str):
            raise UserError(
                f"{place}: a part of 'content' is of type {kind!r}; only parts like "
                '{"type": "text", "text": "..."} can be read: mend or delete it'
            )
        texts.append(text)
    return "".join(texts)
