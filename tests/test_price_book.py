"""The built-in price book: its rows, their names, their age, and how a team's file goes before it."""

from __future__ import annotations

import datetime
from decimal import Decimal
from pathlib import Path

import pytest

from mlflow_tokens.pricing import Price, choose_price
from mlflow_tokens.pricing.book import BookRow, age_warning, find_row, is_book_name, name_of, price_book
from mlflow_tokens.pricing.price_file import VARIABLE

DAY = datetime.date(2026, 11, 9)


def row(
    provider: str, accelerator: str, region: str, kind: str = "on-demand", amount: str = "2.0"
) -> BookRow:
    price = Price(Decimal(amount), "USD", "device-hour", None, kind, "made up", DAY)  # type: ignore[arg-type]
    return BookRow(provider, accelerator, "product", region, price, "page", "record")


ROWS = (
    row("hall", "a800", "north"),
    row("hall", "a800", "south"),
    row("hall", "h20", "north"),
    row("hall", "h20", "north", "spot", "0.7"),
    row("barn", "h20", "south"),
)


def test_every_row_of_the_book_says_where_it_is_from_and_of_when() -> None:
    assert price_book()
    for each in price_book():
        assert each.price.kind is not None and each.price.date is not None
        assert each.price.date <= datetime.date(2026, 12, 1)
        assert each.page in each.price.source and each.product in each.price.source
        assert each.page.startswith("https://") and each.via.startswith("https://")
        assert each.base == each.base.lower() and " " not in each.base + each.region
        assert is_book_name(name_of(each, price_book()))


def test_every_row_is_found_under_its_name() -> None:
    names = [name_of(each, price_book()) for each in price_book()]
    assert len(set(names)) == len(names)
    for each, name in zip(price_book(), names, strict=True):
        assert find_row(name, price_book()) == each


def test_names_are_as_short_as_they_can_be() -> None:
    assert [name_of(each, ROWS) for each in ROWS] == [
        "hall/a800/north",
        "hall/a800/south",
        "hall/h20/on-demand",
        "hall/h20/spot",
        "barn/h20",
    ]
    assert find_row(" Hall/H20/spot/north ", ROWS) == ROWS[3]


def test_a_name_of_several_rows_says_which_there_are() -> None:
    with pytest.raises(ValueError, match="say which: 'hall/a800/north', 'hall/a800/south'"):
        find_row("hall/a800", ROWS)
    with pytest.raises(ValueError, match="say which: 'hall/h20/on-demand', 'hall/h20/spot'"):
        find_row("hall/h20/north", ROWS)


def test_a_name_of_no_row_says_which_are_close() -> None:
    with pytest.raises(ValueError, match=r"no row of the price book; close to it: 'barn/h20'"):
        find_row("bern/h20", ROWS)
    with pytest.raises(ValueError, match="no row of the price book; close to it: 'hall/a800/"):
        find_row("hall/a800/east", ROWS)
    with pytest.raises(ValueError, match="`mlflow-tokens prices` lists all"):
        find_row("nobody/nothing", ROWS)


def test_a_price_out_of_the_book() -> None:
    choice = choose_price("aws/h100-80gb", {}, DAY)
    assert choice.price is not None
    assert str(choice.price) == "55.04 USD/instance-hour x8 on-demand"
    assert choice.price.date == DAY
    assert "https://aws.amazon.com/ec2/pricing/on-demand/" in choice.price.source
    assert choice.notices == ()
    # 8 devices rented whole: 55.04 / 8 = 6.88 an hour each.
    assert round(choice.price.per_device_second([8]) * 3600, 20) == Decimal("6.88")


def test_an_ambiguous_and_an_unknown_name() -> None:
    with pytest.raises(ValueError, match="'runpod/h100-80gb/secure-cloud'"):
        choose_price("runpod/h100-80gb", {})
    with pytest.raises(ValueError, match="close to it: 'aws/h100-80gb'"):
        choose_price("aws/h100", {})
    with pytest.raises(ValueError, match="or a name out of the price book, such as 'aws/h200-141gb'"):
        choose_price("H200", {})


def test_an_unknown_name_may_be_close_to_one_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "prices.toml"
    path.write_text("[prices.'hall/a800']\nprice = '5 CNY/device-hour'", "utf-8")
    with pytest.raises(ValueError, match=r"or a name out of .*prices\.toml, such as 'hall/a800'"):
        choose_price("hall/a80", {VARIABLE: str(path)})


def test_an_old_row_is_used_with_a_warning_that_says_its_age() -> None:
    assert age_warning(DAY, DAY + datetime.timedelta(days=180)) is None
    choice = choose_price("aws/h100-80gb", {}, DAY + datetime.timedelta(days=181))
    assert choice.price is not None
    (notice,) = choice.notices
    assert notice == "The price aws/h100-80gb of the price book is 181 days old, of 2026-11-09: check it."


def test_the_file_of_a_team_goes_before_the_book_and_says_the_currency(tmp_path: Path) -> None:
    path = tmp_path / "prices.toml"
    path.write_text(
        """
currency = "CNY"
[rates.USD]
rate = "7.12"
date = 2026-11-30
[prices."aws/h100-80gb"]
price = "30 CNY/device-hour reserved"
""",
        "utf-8",
    )
    ours = choose_price("aws/h100-80gb", {VARIABLE: str(path)}, DAY).price
    assert ours is not None
    assert str(ours) == "30 CNY/device-hour reserved"
    theirs = choose_price("runpod/h100-80gb/secure-cloud", {VARIABLE: str(path)}, DAY).price
    assert theirs is not None
    # 3.99 x 7.12 = 28.4088.
    assert (theirs.amount, theirs.currency) == (Decimal("28.4088"), "CNY")
    assert theirs.source.endswith("3.99 USD/device-hour on-demand at 7.12 CNY of 2026-11-30")
