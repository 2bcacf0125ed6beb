"""The field's published examples, by the project's own account; by hand in docs/worked-examples.md."""

from __future__ import annotations

from decimal import Decimal

import pytest

from mlflow_tokens.account import Account, account_of
from mlflow_tokens.pricing import Electricity, cost_of_energy
from mlflow_tokens.statement import statement_of
from tests.journals import price, quantities, segment

STEPS, BATCH, ACCUMULATION, WIDTH, DAYS = 190_000, 16, 2, 1024, 7


def bank(machines: int, text: str) -> Account:
    """A week on machines of 8 cards, without padding, that was trained from the first second to the last."""
    devices = 8 * machines
    tokens = STEPS * BATCH * ACCUMULATION * WIDTH * devices
    return account_of(
        [
            segment(devices_by_node=(8,) * machines),
            price(text),
            quantities(
                ranks=devices,
                step=STEPS,
                train=float(DAYS * 24 * 3600 * devices),
                computed=tokens,
                valid=tokens,
            ),
        ]
    )


@pytest.mark.parametrize(
    ("machines", "tokens_a_step", "device_hours", "watts"),
    [(1, 262_144, 1344, 74), (2, 524_288, 2688, 37)],
)
def test_the_two_readings_of_the_banks_model(
    machines: int, tokens_a_step: int, device_hours: int, watts: int
) -> None:
    account = bank(machines, "1 CNY/device-hour")
    assert account.computed == STEPS * tokens_a_step
    made = statement_of(account, "FINISHED")
    assert made.device_hours == device_hours
    assert made.total is not None
    assert round(made.total, 9) == device_hours
    # 100 kWh over the device-hours.
    assert round(100_000 / device_hours) == watts


def test_what_12000_cny_a_run_are_a_device_hour_and_a_million_tokens() -> None:
    # 12,000 / 1,344 = 8.9286 CNY a device-hour; 12,000 / 49,807.36 million tokens = 0.24093 CNY.
    made = statement_of(bank(1, "8.928571428571428571 CNY/device-hour"), "FINISHED")
    assert made.total is not None
    assert made.per_million is not None
    assert round(made.total, 6) == 12_000
    assert round(made.per_million, 5) == Decimal("0.24093")


def test_what_the_published_energy_costs_and_what_the_cards_would_have_drawn() -> None:
    tariff = Electricity(Decimal("0.70"), "CNY", pue=Decimal(1), node_overhead_watts=Decimal(0))
    # 100 kWh are 360 MJ, and 70 CNY at 0.70 CNY a kWh, as published.
    assert cost_of_energy(tariff, 360_000_000, 0) == 70
    # 8 cards of 300 W for 1,344 device-hours draw 403.2 kWh, 282.24 CNY; 16 draw 806.4 kWh, 564.48 CNY.
    for machines, cost in ((1, "282.24"), (2, "564.48")):
        made = statement_of(bank(machines, "1 CNY/device-hour"), "FINISHED")
        assert made.device_hours is not None
        assert cost_of_energy(tariff, 300 * 3600 * made.device_hours, 0) == Decimal(cost)


def test_100_million_tokens_at_48_million_an_hour() -> None:
    fed = quantities(train=3600 * 100 / 48, computed=100_000_000, valid=100_000_000)
    account = account_of([segment(), price("1.85 USD/device-hour"), fed])
    # 1.85 x 100 / 48 = 3.854166…
    assert float(account.cost or 0) == pytest.approx(3.8541666666666667, rel=1e-9)
