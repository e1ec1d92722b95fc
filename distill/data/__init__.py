"""Text to training rows: sources, the held-out split, tokens, packing, a saved position.

- `check_local`: refuses local text that no run could start with
- `check_every_document`: refuses local text that a run would stop at, chats among it
- `data_identity`, `as_recorded`: what tells a text from another one, and from what it was before
- `documents`: the documents of one split, once, in the source's own order
- `PackedStream`: endless packed rows of one split, with an exact saved position
- `heldout_batches`: a fixed, finite list of packed rows of the held-out split
- `Batch`: what both give: ids, labels, document of each token, padding
"""

from __future__ import annotations

from ltconvert.distill.data.batch import Batch
from ltconvert.distill.data.check import check_every_document, check_local
from ltconvert.distill.data.content import as_recorded, data_identity
from ltconvert.distill.data.documents import Document
from ltconvert.distill.data.pack import PackedStream, heldout_batches
from ltconvert.distill.data.sources import documents, on_hub, open_source

__all__ = [
    "Batch",
    "Document",
    "PackedStream",
    "as_recorded",
    "check_every_document",
    "check_local",
    "data_identity",
    "documents",
    "heldout_batches",
    "on_hub",
    "open_source",
]
