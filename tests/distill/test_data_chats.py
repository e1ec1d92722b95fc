"""Chats: what a message may hold, and how one that the template refuses is named."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from ltconvert.distill.data import check, check_every_document, documents
from ltconvert.distill.data.documents import Document, record_document
from ltconvert.distill.data.tokens import Encoder
from ltconvert.errors import UserError
from ltconvert.recipes.data import DataSettings

CALL = [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]
STRICT = (
    "{% for m in messages %}{% if m['role'] != ['user', 'assistant'][loop.index0 % 2] %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ m['content'] }}{% endfor %}"
)


def chat(*contents: Any, **more: Any) -> list[dict[str, Any]]:
    """User and assistant in turn; ``more`` goes into the last message."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]
    messages[-1] |= more
    return messages


def read(messages: Any) -> Document | None:
    return record_document({"messages": messages}, DataSettings(), "a.jsonl, line 7")


def write(path: Path, chats: list[Any]) -> DataSettings:
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in chats))
    return DataSettings(source=str(path), heldout_share=0.2)


GOOD = [chat(f"question {i}", "answer") for i in range(60)]


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "one, "}, {"type": "text", "text": "two"}]
    assert read(chat(parts, "yes")) == read(chat("one, two", "yes"))  # and in the same split


@pytest.mark.parametrize(
    ("messages", "wrong"),
    [
        (chat("hi", None), "message 2: 'content' is missing or null"),
        (chat("hi", {"a": 1}), "message 2: 'content' is a dict"),
        ([{"content": "hi"}], "message 1: 'role' is missing or null"),
        ([{"role": 3, "content": "hi"}], "message 1: 'role' is a int"),
        (chat([{"type": "image_url"}]), "message 1: a part of 'content' is of type 'image_url'"),
        (chat(["hi"]), "message 1: a part of 'content' is of type 'str'"),
        ("hi", "field 'messages' is not a list of messages"),
        (5, "field 'messages' is not a list of messages"),
    ],
)
def test_what_is_no_message(messages: Any, wrong: str) -> None:
    with pytest.raises(UserError, match=f"^a.jsonl, line 7.*{wrong}") as error:
        read(messages)
    assert "\n" not in str(error.value)


def test_calls_of_tools_are_left_to_the_template(tiny_tokenizer: Any) -> None:
    document = read(chat("hi", None, tool_calls=CALL))
    assert document is not None and document.text == "hi\n\n"
    tiny_tokenizer = _with(tiny_tokenizer, "{{ messages[1].tool_calls[0].function.name }}")
    assert Encoder(tiny_tokenizer).render(document) == "f"


def _with(tokenizer: Any, template: str) -> Any:
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("line", [1, 30, 60])
def test_a_refused_chat_is_found_wherever_it_stands(
    tmp_path: Path, tiny_tokenizer: Any, line: int
) -> None:
    strict = _with(tiny_tokenizer, STRICT)
    chats = [list(messages) for messages in GOOD]
    data = write(tmp_path / "chats.jsonl", chats)
    check_every_document(data, strict)
    chats[line - 1].reverse()
    data = write(tmp_path / "chats.jsonl", chats)
    with pytest.raises(UserError, match=f"chats.jsonl, line {line}: .*must alternate.*delete it"):
        check_every_document(data, strict)


def test_a_large_corpus_is_looked_at_in_part(
    tmp_path: Path, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"text": "line {i:03}"}}\n' for i in range(100)))
    monkeypatch.setattr(check, "WHOLE_BYTES", path.stat().st_size // 10)
    seen: list[str] = []
    monkeypatch.setattr(Encoder, "render", lambda _, document: seen.append(document.text))
    check_every_document(DataSettings(source=str(path)), tiny_tokenizer)
    assert seen == [f"line {i:03}" for i in range(0, 100, 10)]


@pytest.mark.parametrize("copies", [1, 3])
@pytest.mark.parametrize("seen", [check.check_local, lambda data: list(documents(data, "heldout"))])
def test_one_document_is_not_helped_by_a_larger_share(
    tmp_path: Path, copies: int, seen: Any
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "all there is"}\n' * copies)
    with pytest.raises(UserError, match="no two that differ: give more documents") as error:
        seen(DataSettings(source=str(path), heldout_share=1e-9))
    assert "share" not in str(error.value)
    path.write_text('{"text": "all there is"}\n{"text": "but this"}\n')
    with pytest.raises(UserError, match="heldout_share is 1e-09: raise it, or give more"):
        seen(DataSettings(source=str(path), heldout_share=1e-9))
