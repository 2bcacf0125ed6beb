"""Three ways to make batches of the same documents. They train the same tokens, at very different prices.

padded    shuffled, every row padded to the longest of its batch: simple, and half of the work is padding
grouped   documents of like length together, then padded to the longest: little padding, batches less random
packed    documents joined end to end and cut into rows of one length: no padding, but a row runs across
          documents, which may see one another (common in pretraining)

A document is an int64 array of ids that ends with EOS. A document of n ids is n positions in every mode: the
model reads BOS and all but its last id, and predicts all of it. So no position is without a label except
padding, and valid tokens equal trained tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Row = tuple[np.ndarray, np.ndarray]  # input_ids and labels, int64 [length]
Batch = dict[str, np.ndarray]
IGNORE_INDEX = -100
MODES = ("padded", "grouped", "packed")


def make_batches(
    mode: str,
    documents: Sequence[np.ndarray],
    *,
    batch_size: int,
    max_length: int,
    pad_id: int,
    bos_id: int,
    seed: int = 0,
    rank: int = 0,
    world_size: int = 1,
) -> list[Batch]:
    """One pass over the documents, as the batches of one rank, in the order to train on them.

    A batch holds int64 arrays [rows, length]: `input_ids`, padded with `pad_id`, and `labels`, the next token
    of every position, IGNORE_INDEX where there is none. Documents are cut at `max_length` in every mode, so
    that all of them deal out the same tokens.

    The ranks take `batch_size x world_size` rows at a time, rank r every `world_size`-th of these from the
    r-th on. What remains at the end is dealt out the same way as one smaller batch. If that is less than a
    row for every rank it is left out, so that every rank gets the same number of batches and none waits for
    ever for another. Packing also leaves out the last tokens, which do not fill a row.
    """
    documents = [cut(document, max_length) for document in documents]
    random = np.random.default_rng(seed)
    documents = [documents[i] for i in random.permutation(len(documents))]
    if mode == "packed":
        rows = packed_rows(documents, max_length, bos_id)
    else:
        rows = [row_of(document, bos_id) for document in documents]
    if mode == "grouped":
        rows.sort(key=lambda row: len(row[0]))

    together = batch_size * world_size
    shared = [rows[start : start + together] for start in range(0, len(rows), together)]
    if shared and len(shared[-1]) < world_size:
        shared.pop()
    if mode == "grouped":  # from short to long is no order to train in
        shared = [shared[i] for i in random.permutation(len(shared))]
    return [padded_to_longest(some[rank::world_size], pad_id) for some in shared]


def cut(document: np.ndarray, max_length: int) -> np.ndarray:
    """The beginning of a document that is too long, still ending with EOS."""
    return document if len(document) <= max_length else np.append(document[: max_length - 1], document[-1])


def row_of(document: np.ndarray, bos_id: int) -> Row:
    """One document, or any run of tokens, as a row: read BOS and all but the last id, predict every id."""
    return np.concatenate([[bos_id], document[:-1]]), document


def packed_rows(documents: Sequence[np.ndarray], length: int, bos_id: int) -> list[Row]:
    """All documents end to end, divided by the EOS each ends with, cut into rows of exactly `length`."""
    input_ids, labels = row_of(np.concatenate(documents), bos_id)
    return [
        (input_ids[start : start + length], labels[start : start + length])
        for start in range(0, len(labels) - length + 1, length)
    ]


def padded_to_longest(rows: Sequence[Row], pad_id: int) -> Batch:
    """Rows of any lengths as one batch, filled up on the right to the longest of them."""
    shape = (len(rows), max(len(labels) for _, labels in rows))
    batch = {"input_ids": np.full(shape, pad_id, np.int64), "labels": np.full(shape, IGNORE_INDEX, np.int64)}
    for i, (input_ids, labels) in enumerate(rows):
        batch["input_ids"][i, : len(input_ids)] = input_ids
        batch["labels"][i, : len(labels)] = labels
    return batch
