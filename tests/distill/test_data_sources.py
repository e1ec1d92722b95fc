"""Where documents come from: formats, packings, folders, the embedded text, and every error."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import sys
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from ltconvert.distill.data import documents, open_source
from ltconvert.distill.data.documents import Document, is_heldout
from ltconvert.distill.data.sources import one_epoch
from ltconvert.distill.data.topics import topic_documents
from ltconvert.errors import UserError
from ltconvert.recipes.data import DataSettings

TEXTS = [
    f"Document {i} of a small corpus.\nIt has two lines, {'and ' * (i % 7)}more." for i in range(40)
]


def settings(source: Path | str, **changes: object) -> DataSettings:
    return DataSettings(source=str(source), **{"heldout_share": 0.25, **changes})


def both_splits(data: DataSettings) -> list[str]:
    return [*documents(data, "train"), *documents(data, "heldout")]


def write_jsonl(path: Path, texts: list[str] = TEXTS, field: str = "text") -> Path:
    path.write_text("".join(json.dumps({field: text, "id": 1}) + "\n" for text in texts))
    return path


def zst(raw: bytes) -> bytes:
    return pyarrow.compress(raw, codec="zstd", asbytes=True)


PACKERS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zst}


@pytest.mark.parametrize("suffix", ["", *PACKERS])
def test_jsonl_plain_and_packed(tmp_path: Path, suffix: str) -> None:
    raw = write_jsonl(tmp_path / "plain").read_bytes()
    path = tmp_path / f"corpus.jsonl{suffix}"
    pack = PACKERS.get(suffix, bytes)
    path.write_bytes(pack(raw[:100]) + pack(raw[100:]))  # as several packers at once write them
    assert sorted(both_splits(settings(path))) == sorted(TEXTS)


def test_parquet_and_renamed_field(tmp_path: Path) -> None:
    path = tmp_path / "corpus.parquet"
    table = pyarrow.table({"body": TEXTS, "other": list(range(len(TEXTS)))})
    parquet.write_table(table, path, row_group_size=7)
    assert sorted(both_splits(settings(path, text_field="body"))) == sorted(TEXTS)
    with pytest.raises(UserError, match=r"corpus.parquet.*'text'.*fields there: body, other"):
        both_splits(settings(path))


def test_bytes_in_parquet_are_text(tmp_path: Path) -> None:
    path = tmp_path / "corpus.parquet"
    table = pyarrow.table({"text": [f"{text} \u00e9".encode() for text in TEXTS]})
    parquet.write_table(table, path)
    assert sorted(both_splits(settings(path))) == sorted(f"{text} \u00e9" for text in TEXTS)
    parquet.write_table(pyarrow.table({"text": [b"caf\xe9"]}), path)
    with pytest.raises(UserError, match="not UTF-8 in the columns text"):
        both_splits(settings(path))


def test_text_file_is_cut_at_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    text = "\n\n".join(f"Paragraph {i}. " + "word " * 200 for i in range(100))
    path.write_text(text)
    found = both_splits(settings(path, heldout_share=0.5))
    assert 3 < len(found) < 10
    starts = sorted(text.index(document) for document in found)
    assert starts[0] == 0 and all(text[s - 2 : s] == "\n\n" for s in starts[1:])
    assert sum(map(len, found)) == len(text)


def test_folder_of_mixed_files_ignores_hidden_and_other_files(tmp_path: Path) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / ".hidden").mkdir()
    write_jsonl(tmp_path / "deep" / "a.jsonl", TEXTS[:20])
    (tmp_path / "deep" / "er" / "b.jsonl.gz").write_bytes(
        gzip.compress(write_jsonl(tmp_path / "x.tmp", TEXTS[20:39]).read_bytes())
    )
    (tmp_path / "c.txt").write_text(TEXTS[39])
    write_jsonl(tmp_path / ".hidden" / "d.jsonl", ["never read"])
    assert sorted(both_splits(settings(tmp_path))) == sorted(TEXTS)


def test_split_depends_on_the_text_alone(tmp_path: Path) -> None:
    forward = settings(write_jsonl(tmp_path / "a.jsonl"))
    backward = settings(write_jsonl(tmp_path / "b.jsonl", TEXTS[::-1] + TEXTS))
    heldout = set(documents(forward, "heldout"))
    assert heldout == set(documents(backward, "heldout"))
    assert heldout.isdisjoint(documents(backward, "train"))
    assert heldout == {text for text in TEXTS if is_heldout(text, 0.25)}


def test_heldout_share_is_met_and_grows_by_inclusion() -> None:
    texts = [f"text {i}" for i in range(20_000)]
    small = {text for text in texts if is_heldout(text, 0.05)}
    # Binomial: 1000 +- 31.
    assert abs(len(small) - 1000) < 150
    assert small <= {text for text in texts if is_heldout(text, 0.1)}


def test_chats_are_read_beside_texts(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    chats = [
        [{"role": "user", "content": f"hi {i}"}, {"role": "assistant", "content": "yes"}]
        for i in range(20)
    ]
    lines = [{"messages": chat} for chat in chats] + [{"messages": None, "text": "plain"}]
    path.write_text("\n".join(map(json.dumps, lines)))
    found = both_splits(settings(path))
    assert sorted(found) == sorted([*(f"hi {i}\n\nyes" for i in range(20)), "plain"])
    path.write_text(json.dumps({"messages": ["hi"]}))
    with pytest.raises(UserError, match=r"line 1: field 'messages' is not a list of messages"):
        both_splits(settings(path))


def test_blank_lines_and_empty_texts_are_no_documents(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('\n{"text": ""}\n{"text": "  "}\n\n{"text": null}\n{"text": "one"}')
    assert list(one_epoch(open_source(settings(path, heldout_share=1e-9)), "train")) == [
        Document("one", False)
    ]


def test_pydoc_holds_out_whole_sections_and_no_copies() -> None:
    data = DataSettings(source="pydoc", heldout_share=0.1)
    heldout, train = list(documents(data, "heldout")), list(documents(data, "train"))
    size = sum(map(len, heldout)) + sum(map(len, train))
    assert size > 250_000
    assert 0.05 < sum(map(len, heldout)) / size < 0.2
    trained = {line for text in train for line in text.splitlines() if len(line) > 60}
    lines = [line for text in heldout for line in text.splitlines() if len(line) > 60]
    # A few sentences do stand twice in the reference (grammar rules, "Changed in version").
    assert sum(line in trained for line in lines) < 0.03 * len(lines)


def test_topics_that_stand_in_longer_ones_are_left_out() -> None:
    paragraphs = [f"Paragraph {i} {'x' * 900}" for i in range(12)]
    topics = {"whole": "\n\n".join(paragraphs), "part": "\n\n".join(paragraphs[3:6])}
    assert "\n\n".join(d.text for d in topic_documents(topics, 0.3)).strip() == topics["whole"]
    assert {d.heldout for d in topic_documents(topics, 0.3)} == {True, False}


def test_a_second_reading_finds_the_unpacked_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jsonl.xz"
    path.write_bytes(lzma.compress(write_jsonl(tmp_path / "plain").read_bytes()))
    first = both_splits(settings(path))
    monkeypatch.setitem(
        sys.modules["ltconvert.distill.data.unpack"].OPENERS,
        ".xz",
        lambda path: pytest.fail("unpacked again"),
    )
    assert both_splits(settings(path)) == first


# Errors: one line each, which says what was given and what to do.


def one_line(error: pytest.ExceptionInfo[UserError]) -> str:
    text = str(error.value)
    assert "\n" not in text and len(text) < 400
    return text


@pytest.mark.parametrize(
    "name", ["no/such/file.jsonl", "./missing", "/nowhere/at/all", "gone.txt.gz"]
)
def test_missing_file(name: str) -> None:
    with pytest.raises(UserError, match="no such file or folder") as error:
        open_source(settings(name))
    assert name in one_line(error)


def test_unreachable_hub_set() -> None:
    with pytest.raises(
        UserError, match="no file or folder here, and reading it from the hub"
    ) as error:
        open_source(settings("someone/something"))
    assert "someone/something" in one_line(error)


def test_missing_text_field_names_those_that_are_there(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", field="content")
    with pytest.raises(
        UserError, match=r"line 1: .*'text'.*\(fields there: content, id\); set data"
    ):
        both_splits(settings(path))


def test_text_field_of_another_type(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": 5}')
    with pytest.raises(UserError, match=r"line 1: field 'text' holds a int"):
        both_splits(settings(tmp_path / "a.jsonl"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "cut o', "line 3: not a JSON object"),
        (b"[1]", "line 3: a JSON list"),
        (b'"\xff"', "line 3: not UTF-8"),
        (b'{"text": "a", "id": ' + b"9" * 5000 + b"}", "line 3: not a JSON object"),
        (b'{"text": "a", "id": ' + b"[" * 100_000, "line 3: not a JSON object"),
    ],
)
def test_corrupt_line(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "good"}\n\n' + line + b'\n{"text": "good too"}\n')
    with pytest.raises(UserError, match=message) as error:
        both_splits(settings(path))
    assert str(path) in one_line(error)


@pytest.mark.parametrize("suffix", [*PACKERS])
@pytest.mark.parametrize("damage", ["cut", "noise"])
def test_damaged_packing(tmp_path: Path, suffix: str, damage: str) -> None:
    packed = PACKERS[suffix](write_jsonl(tmp_path / "plain").read_bytes())
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(packed[:-20] if damage == "cut" else b"nothing of the kind" * 9)
    with pytest.raises(UserError, match="damaged or cut off") as error:
        open_source(settings(path))
    assert str(path) in one_line(error)


def test_damaged_parquet(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and then nothing useful")
    with pytest.raises(UserError, match="damaged or cut off"):
        open_source(settings(tmp_path / "a.parquet"))


def test_empty_corpora(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").touch()
    with pytest.raises(UserError, match="is empty: there is no document in it"):
        open_source(settings(tmp_path / "a.jsonl"))
    (tmp_path / "blank.jsonl").write_text("\n\n\n")
    with pytest.raises(UserError, match="no document with text is left to train on"):
        list(documents(settings(tmp_path / "blank.jsonl"), "train"))
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match=r"no supported file in this folder \(supported: jsonl"):
        open_source(settings(tmp_path / "folder"))
    (tmp_path / "a.docx").touch()
    with pytest.raises(UserError, match="this kind of file is not supported"):
        open_source(settings(tmp_path / "a.docx"))


def test_empty_heldout_split(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [t for t in TEXTS if not is_heldout(t, 0.1)])
    with pytest.raises(UserError, match=r"held-out split; data.heldout_share is 0.1: raise it"):
        list(documents(settings(path, heldout_share=0.1), "heldout"))
