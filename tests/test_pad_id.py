"""What a tokenizer, a model's configuration and a criterion say, and what of it is knowledge."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mlflow_tokens.paddle.pad_id import ignore_index_of, pad_id_of


def tokenizer(**values: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"pad_token": "<pad>", "pad_token_id": 7, "eos_token_id": 2, **values})


@pytest.mark.parametrize(
    ("of_tokenizer", "of_config", "pad"),
    [
        (tokenizer(), None, 7),
        (tokenizer(pad_token_id=0), None, 0),  # BERT's [PAD]: somebody has set it
        (tokenizer(pad_token_id=2), None, None),  # the end of a text
        (tokenizer(pad_token_id=1, bos_token_id=1), None, None),
        (tokenizer(pad_token_id=2), SimpleNamespace(pad_token_id=9), None),  # it pads with what it says
        (tokenizer(pad_token=None), None, None),  # an id without a token
        (tokenizer(pad_token=None), SimpleNamespace(pad_token_id=9), 9),
        (None, SimpleNamespace(pad_token_id=9, eos_token_id=2), 9),
        (None, SimpleNamespace(pad_token_id=0, eos_token_id=2), None),  # the default
        (None, SimpleNamespace(pad_token_id=2, eos_token_id=2), None),
        (None, SimpleNamespace(pad_token_id=2, eos_token_id=[1, 2]), None),
        (None, SimpleNamespace(pad_token_id=-1), None),
        (None, SimpleNamespace(pad_token_id=None), None),
        (None, SimpleNamespace(pad_token_id=True), None),
        (None, None, None),
    ],
)
def test_pad_id(of_tokenizer: Any, of_config: Any, pad: int | None) -> None:
    assert pad_id_of(of_tokenizer, of_config) == pad


@pytest.mark.parametrize(
    ("owner", "index"),
    [
        (SimpleNamespace(ignore_index=-1), -1),
        (SimpleNamespace(ignored_index=0), 0),
        (SimpleNamespace(), None),
        (SimpleNamespace(ignore_index="none"), None),
        (None, None),
    ],
)
def test_ignore_index(owner: Any, index: int | None) -> None:
    assert ignore_index_of(owner) == index
