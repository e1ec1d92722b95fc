"""Packing, its labels and segments, determinism, saved positions, processes, hub streams."""

from __future__ import annotations

import json
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from ltconvert.distill.data import Batch, PackedStream, heldout_batches
from ltconvert.distill.data.documents import Document, is_heldout
from ltconvert.distill.data.hub import HubSource
from ltconvert.distill.data.tokens import Encoder, separator_id
from ltconvert.distill.prefetch import Prefetch
from ltconvert.errors import UserError
from ltconvert.recipes.data import DataSettings

SEPARATOR = 0  # `<|endoftext|>` of the tiny tokenizer
TEXTS = [f"Number {i}: " + "tell me more. " * (i * i % 23) for i in range(90)]


@pytest.fixture
def data(tmp_path: Path) -> DataSettings:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return DataSettings(source=str(path), heldout_share=0.2)


def stream(data: DataSettings, tokenizer: Any, **changes: Any) -> PackedStream:
    options = {"split": "train", "seq_len_tokens": 61, "rows": 3, "rank": 0, "world": 1, **changes}
    return PackedStream(data, tokenizer, **options)


def same(a: Batch, b: Batch) -> bool:
    names = ("input_ids_BT", "segment_ids_BT", "labels_BT", "keep_BT")
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in names)


def unpack(batches: list[Batch]) -> list[list[int]]:
    """The documents in order, put together again with nothing but ids and segments."""
    pieces: list[list[int]] = [[]]
    for batch in batches:
        for ids, keep in zip(batch.input_ids_BT.tolist(), batch.keep_BT.tolist(), strict=True):
            for token, kept in zip(ids, keep, strict=True):
                if kept:
                    pieces[-1].append(token)
                    if token == SEPARATOR:
                        pieces.append([])
    return pieces


def test_one_epoch_holds_every_training_document_once_and_whole(
    data: DataSettings, tiny_tokenizer: Any
) -> None:
    expected = [t for t in TEXTS if not is_heldout(t, 0.2)]
    pieces = unpack(list(islice(stream(data, tiny_tokenizer), 200)))
    first_epoch = [tiny_tokenizer.decode(piece[:-1]) for piece in pieces[: len(expected)]]
    assert sorted(first_epoch) == sorted(expected)
    assert first_epoch != expected  # shuffled
    second_epoch = [
        tiny_tokenizer.decode(piece[:-1]) for piece in pieces[len(expected) : 2 * len(expected)]
    ]
    assert sorted(second_epoch) == sorted(expected)
    assert second_epoch != first_epoch  # and anew


def test_labels_and_segments_by_hand(tmp_path: Path, tiny_tokenizer: Any) -> None:
    path = tmp_path / "two.jsonl"
    path.write_text('{"text": "abcdefg"}\n{"text": "xy"}\n')
    share = 1e-9
    assert not any(is_heldout(t, share) for t in ("abcdefg", "xy"))
    settings = DataSettings(source=str(path), heldout_share=share)
    batch = next(stream(settings, tiny_tokenizer, seq_len_tokens=5, rows=2))
    a, b = (
        tiny_tokenizer(t, add_special_tokens=False)["input_ids"] + [0] for t in ("abcdefg", "xy")
    )
    documents = [a, b] if batch.input_ids_BT[0, 0] == a[0] else [b, a]
    flat = [t for d in documents for t in d][:10]
    nexts = [t for d in documents for t in [*d[1:], -100]][:10]
    assert batch.input_ids_BT.flatten().tolist() == flat
    assert batch.labels_BT.flatten().tolist() == nexts  # also across the end of row 0
    ends = [len(documents[0]), 11]
    segments = [[sum(e <= i for e in ends) for i in row] for row in (range(5), range(5, 10))]
    assert batch.segment_ids_BT.tolist() == [[s - row[0] for s in row] for row in segments]
    assert batch.keep_BT.all()
    assert batch.input_ids_BT.dtype == batch.labels_BT.dtype == torch.int64
    assert batch.segment_ids_BT.dtype == torch.int32


def test_rows_are_the_same_again_and_other_with_another_seed(
    data: DataSettings, tiny_tokenizer: Any
) -> None:
    first = list(islice(stream(data, tiny_tokenizer), 40))
    again = list(islice(stream(data, tiny_tokenizer), 40))
    other = list(islice(stream(data, tiny_tokenizer, seed=1), 40))
    assert all(map(same, first, again))
    assert not all(map(same, first, other))


@pytest.mark.parametrize("stops", [(1, 2), (7, 30), (33, 34), (90, 170)])
def test_first_and_second_resume_continue_exactly(
    data: DataSettings, tiny_tokenizer: Any, stops: tuple[int, int]
) -> None:
    whole = list(islice(stream(data, tiny_tokenizer), 200))
    begun, parts = 0, []
    state: dict[str, Any] | None = None
    for stop in (*stops, 200):
        part = stream(data, tiny_tokenizer)
        if state is not None:
            part.load_state_dict(state)
        parts += islice(part, stop - begun)
        state = json.loads(json.dumps(part.state_dict()))
        assert len(json.dumps(state)) < 1000
        begun = stop
    assert all(map(same, whole, parts)) and len(whole) == len(parts)


@pytest.mark.parametrize("world", [2, 3])
def test_processes_share_the_rows_of_one(
    data: DataSettings, tiny_tokenizer: Any, world: int
) -> None:
    one = stream(data, tiny_tokenizer, rows=2 * world)
    ranks = [stream(data, tiny_tokenizer, rows=2, rank=rank, world=world) for rank in range(world)]
    for _ in range(20):
        parts = [next(rank).input_ids_BT for rank in ranks]
        assert torch.equal(next(one).input_ids_BT, torch.cat(parts))
    assert all(rank.state_dict() == one.state_dict() for rank in ranks)


def test_position_of_other_data_is_refused(data: DataSettings, tiny_tokenizer: Any) -> None:
    state = stream(data, tiny_tokenizer).state_dict()
    with Path(data.source).open("a") as file:
        file.write('{"text": "one more"}\n')
    with pytest.raises(UserError, match="has changed since the checkpoint"):
        stream(data, tiny_tokenizer).load_state_dict(state)


def test_row_longer_than_the_corpus(data: DataSettings, tiny_tokenizer: Any) -> None:
    size = sum(len(t) for t in TEXTS)
    with pytest.raises(
        UserError, match=r"tokens in its train split, fewer than one row.*lower seq_len_tokens"
    ):
        next(stream(data, tiny_tokenizer, seq_len_tokens=size + 100, rows=1))


def test_no_training_documents(tmp_path: Path, tiny_tokenizer: Any) -> None:
    (tmp_path / "a.txt").write_text(next(t for t in TEXTS if is_heldout(t, 0.2)))
    with pytest.raises(UserError, match="no document with text is left to train on"):
        next(stream(DataSettings(source=str(tmp_path), heldout_share=0.2), tiny_tokenizer))


def test_heldout_batches_are_finite_fixed_and_padded_at_the_end(
    data: DataSettings, tiny_tokenizer: Any
) -> None:
    expected = [t for t in TEXTS if is_heldout(t, 0.2)]
    batches = heldout_batches(data, tiny_tokenizer, 10**6, 61, 4)
    pieces = unpack(batches)
    assert [tiny_tokenizer.decode(piece[:-1]) for piece in pieces if piece] == expected
    assert all(
        map(
            same,
            batches,
            heldout_batches(
                data.model_copy(update={"shuffle_seed": 5}), tiny_tokenizer, 10**6, 61, 4
            ),
        )
    )
    last = batches[-1]
    padding = ~last.keep_BT
    assert padding.any() and not padding[:-1].any()
    assert (last.labels_BT[padding] == -100).all()
    padded = last.segment_ids_BT[-1][padding[-1]]
    assert (padded > last.segment_ids_BT[-1][last.keep_BT[-1]].max()).all()
    assert sum(batch.tokens for batch in batches) == sum(map(len, pieces))
    few = heldout_batches(data, tiny_tokenizer, 61 * 5, 61, 4)
    assert [len(batch.input_ids_BT) for batch in few] == [4, 1]
    assert all(batch.keep_BT.all() for batch in few)


def test_heldout_batches_of_an_empty_split(tmp_path: Path, tiny_tokenizer: Any) -> None:
    (tmp_path / "a.txt").write_text(next(t for t in TEXTS if not is_heldout(t, 0.2)))
    with pytest.raises(UserError, match="no document fell into the held-out split"):
        heldout_batches(
            DataSettings(source=str(tmp_path), heldout_share=0.2), tiny_tokenizer, 100, 10, 1
        )


def test_half_a_character_is_replaced_and_a_whole_one_is_not(tiny_tokenizer: Any) -> None:
    texts = [json.loads(r'"a \ud83d\ude00 b \ud800 c"'), "a \U0001f600 b \ufffd c"]
    half, whole = Encoder(tiny_tokenizer).encode([Document(text, False) for text in texts])
    assert half.tolist() == whole.tolist()


def test_chat_goes_through_the_template(tiny_tokenizer: Any) -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    [ids] = Encoder(tiny_tokenizer).encode([Document(chat, False)])
    assert (
        tiny_tokenizer.decode(ids[:-1])
        == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"
    )
    assert ids[-1] == SEPARATOR


def test_separator_is_the_base_vocabularys_end_of_text(tiny_tokenizer: Any) -> None:
    assert tiny_tokenizer.eos_token_id == 2 and separator_id(tiny_tokenizer) == SEPARATOR


class _WithBos:
    """A tokenizer that puts a beginning-of-text token itself, as Llama's and Gemma's do."""

    bos_token_id, eos_token_id, chat_template = 7, 2, None

    def get_vocab(self) -> dict[str, int]:
        return {}

    def __call__(
        self, text: str | list[str], add_special_tokens: bool = True, **_: Any
    ) -> dict[str, Any]:
        first = [7] if add_special_tokens else []
        encode = lambda t: first + [ord(c) for c in t]  # noqa: E731
        return {"input_ids": encode(text) if isinstance(text, str) else [encode(t) for t in text]}


def test_bos_begins_a_document_where_the_tokenizer_puts_one() -> None:
    encoder = Encoder(_WithBos())
    assert [ids.tolist() for ids in encoder.encode([Document("a", False)])] == [[7, ord("a"), 2]]
    with pytest.raises(UserError, match="no chat template"):
        encoder.encode([Document([{"role": "user", "content": "hi"}], False)])


def test_reading_ahead_changes_neither_batches_nor_positions(
    data: DataSettings, tiny_tokenizer: Any
) -> None:
    plain, ahead = stream(data, tiny_tokenizer), Prefetch(stream(data, tiny_tokenizer))
    with closing(ahead):
        assert ahead.state_dict() == plain.state_dict()
        states = []
        for _ in range(20):
            assert same(next(plain), next(ahead))
            assert ahead.state_dict() == plain.state_dict()
            states.append(plain.state_dict())
        for state in (states[3], states[17], states[0]):
            plain.load_state_dict(state)
            ahead.load_state_dict(state)
            assert all(same(next(plain), next(ahead)) for _ in range(7))


def test_reading_ahead_raises_the_streams_error_in_its_place(
    tmp_path: Path, tiny_tokenizer: Any
) -> None:
    path = tmp_path / "a.jsonl"
    lines = [json.dumps({"text": t}) for t in TEXTS * 5]
    path.write_text("\n".join([*lines, "{broken"]))
    settings = DataSettings(source=str(path), heldout_share=0.2)
    counts = []
    for source in (stream(settings, tiny_tokenizer), Prefetch(stream(settings, tiny_tokenizer))):
        counts.append(0)
        with pytest.raises(UserError, match="line 451: not a JSON object"):
            while counts[-1] < 1000:
                next(source)
                counts[-1] += 1
    assert counts[0] == counts[1] > 0


# Hub data sets: a local file, streamed by the `datasets` library, stands for one.


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DataSettings:
    import datasets

    files = []
    for part in range(3):
        path = tmp_path / f"part{part}.jsonl"
        path.write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXTS[part::3]))
        files.append(str(path))
    real = datasets.load_dataset

    def load(name: str, config: str | None, *, split: str, streaming: bool) -> Any:
        assert (name, config, split, streaming) == ("org/set", "cfg", "train", True)
        return real("json", data_files=files, split="train", streaming=True)

    monkeypatch.setattr(datasets, "load_dataset", load)
    return DataSettings(source="org/set", hub_config="cfg", heldout_share=0.2)


@pytest.mark.parametrize("stops", [(3, 5), (20, 21), (60, 150)])
def test_hub_stream_resumes_twice(
    hub: DataSettings, tiny_tokenizer: Any, stops: tuple[int, int]
) -> None:
    test_first_and_second_resume_continue_exactly(hub, tiny_tokenizer, stops)


def test_hub_stream_resumes_where_the_librarys_state_stands_still(
    hub: DataSettings, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    class Stuck(datasets.IterableDataset):
        """After load_state_dict the state never advances, as in some releases."""

        def load_state_dict(self, state: dict[str, Any]) -> None:
            super().load_state_dict(state)
            self.stuck_state = json.loads(json.dumps(state))

        def state_dict(self) -> dict[str, Any]:
            return getattr(self, "stuck_state", None) or super().state_dict()

    load = datasets.load_dataset

    def load_stuck(*args: Any, **options: Any) -> Any:
        dataset = load(*args, **options)
        dataset.__class__ = Stuck
        return dataset

    monkeypatch.setattr(datasets, "load_dataset", load_stuck)
    monkeypatch.setattr("ltconvert.distill.data.pack.BLOCK_DOCUMENTS", 5)
    for stops in ((3, 5), (20, 41)):
        test_first_and_second_resume_continue_exactly(hub, tiny_tokenizer, stops)


def test_hub_stream_without_the_text_field(hub: DataSettings, tiny_tokenizer: Any) -> None:
    source = HubSource(hub.model_copy(update={"text_field": "content"}))
    with pytest.raises(UserError, match=r"org/set, record 1: .*'content'.*\(fields there: text\)"):
        source.read(source.start(), 4)


def test_a_record_of_a_hub_set_is_named_by_its_number(
    hub: DataSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a resume; the position of an earlier version does not know it."""
    everything = hub.model_copy(update={"heldout_share": 1e-9})
    source = HubSource(everything)
    _, cursor = source.read(source.start(), 7)
    source = HubSource(everything.model_copy(update={"text_field": "content"}))
    with pytest.raises(UserError, match=r"^org/set, record 8: neither"):
        source.read(cursor, 4)
    del cursor["record"]
    with pytest.raises(UserError, match=r"^org/set: neither"):
        source.read(cursor, 4)


def test_padding_is_looked_for_once_on_the_cpu() -> None:
    ids = torch.zeros(1, 4, dtype=torch.int64)
    whole = Batch(ids, ids, ids, torch.ones(1, 4, dtype=torch.bool))
    assert whole.mask_BT is whole.keep_BT  # not known yet
    assert whole.to("cpu").padded is False and whole.to("cpu").mask_BT is None
    assert whole.to("meta").to("meta").padded is False
    cut = Batch(ids, ids, ids, torch.tensor([[True, True, True, False]])).to("meta")
    assert cut.padded and cut.mask_BT is cut.keep_BT
