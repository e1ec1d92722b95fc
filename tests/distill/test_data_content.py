"""What tells a text from another one: its content, not its date; read up to a bound."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ltconvert.distill.data import as_recorded, content, data_identity
from ltconvert.recipes.data import DataSettings


def digest(source: Path | str) -> str | None:
    return content.content_digest(DataSettings(source=str(source)))


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    (folder / "more").mkdir(parents=True)
    (folder / "a.txt").write_text("one text")
    (folder / "more" / "b.jsonl").write_text('{"text": "another"}\n')
    return folder


def test_the_content_counts_and_neither_its_date_nor_its_place(
    corpus: Path, tmp_path: Path
) -> None:
    before = digest(corpus)
    os.utime(corpus / "a.txt", (1, 1))
    assert digest(corpus) == before
    assert digest(corpus.rename(tmp_path / "moved")) == before


@pytest.mark.parametrize("change", ["byte", "name", "new", "gone", "cut elsewhere"])
def test_every_change_of_a_small_corpus_is_seen(corpus: Path, change: str) -> None:
    before = digest(corpus)
    if change == "byte":
        (corpus / "a.txt").write_text("one test")
    elif change == "name":
        (corpus / "a.txt").rename(corpus / "c.txt")
    elif change == "new":
        (corpus / "c.md").write_text("")
    elif change == "gone":
        (corpus / "a.txt").unlink()
    else:  # the same bytes one after the other
        (corpus / "a.txt").write_text("one tex")
        (corpus / "more" / "b.jsonl").write_text('t{"text": "another"}\n')
    assert digest(corpus) != before


def test_files_that_are_no_text_do_not_count(corpus: Path) -> None:
    before = digest(corpus)
    (corpus / "notes.pdf").write_text("x")
    (corpus / ".hidden.txt").write_text("x")
    assert digest(corpus) == before


def test_the_embedded_text_has_a_digest_and_hub_data_has_none() -> None:
    assert digest("pydoc") == digest("pydoc") is not None
    assert digest("someone/data-set") is None
    assert "content" not in data_identity(DataSettings(source="someone/data-set"))


@pytest.mark.parametrize(("size", "wanted"), [(0, 0), (7, 7), (100, 41), (100, 1), (1000, 999)])
def test_blocks_are_evenly_spaced_from_end_to_end(
    size: int, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(content, "BLOCK_BYTES", 8)
    found = [block for block in content.blocks(size, wanted) if block[1]]
    assert sum(length for _, length in found) == wanted
    assert all(length <= 8 for _, length in found)
    ends = [start + length for start, length in found]
    gaps = [start - end for (start, _), end in zip(found[1:], ends, strict=False)]
    assert all(gap >= 0 for gap in gaps) and max(gaps, default=0) - min(gaps, default=0) <= 1
    if len(found) > 1:
        assert found[0][0] == 0 and ends[-1] == size


def test_of_a_large_corpus_a_bounded_part_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(content, "WHOLE_BYTES", 64)
    monkeypatch.setattr(content, "BLOCK_BYTES", 8)
    for name, size in (("a.txt", 300), ("b.txt", 100)):
        (tmp_path / name).write_bytes(b"x" * size)
    _, *read = content._pieces(tmp_path)
    assert sum(map(len, read)) == 64 and sum(map(len, read[:6])) == 48
    before = digest(tmp_path)
    for name, byte in (("a.txt", 0), ("a.txt", 299), ("b.txt", 0), ("b.txt", 99)):
        path = tmp_path / name
        text = path.read_bytes()
        path.write_bytes(text[:byte] + b"y" + text[byte + 1 :])
        assert digest(tmp_path) != before
        path.write_bytes(text + b"x")
        assert digest(tmp_path) != before
        path.write_bytes(text)
    assert digest(tmp_path) == before


def test_an_earlier_call_is_compared_by_what_it_noted() -> None:
    now = {"source": "b.txt", "text_field": "text", "content": "1"}
    bare = {"source": "b.txt", "text_field": "text"}
    assert as_recorded(now, None) == now
    assert as_recorded(now, {"source": "a.txt", "text_field": "text"}) == bare
    moved = {"source": "a.txt", "text_field": "text", "content": "1"}
    assert as_recorded(now, moved) == moved
    assert as_recorded(now, moved | {"content": "2"}) == now
    assert as_recorded(bare, moved | {"source": "b.txt"}) == now  # the file is gone
    assert as_recorded(now, moved | {"text_field": "body"})["text_field"] == "text"
