"""Forecasts: what fits on the device in each phase of a job, and what its moves cost, before the
job runs. See docs/planning.md."""

from __future__ import annotations

from typing import TYPE_CHECKING

from placement.core import on_demand as _on_demand

if TYPE_CHECKING:
    from placement.forecasting.description import (
        Forecast,
        HandleForecast,
        Layout,
        Link,
        PhaseForecast,
    )
    from placement.forecasting.job import Model, Rollout, forecast

__all__ = [
    "Forecast",
    "HandleForecast",
    "Layout",
    "Link",
    "Model",
    "PhaseForecast",
    "Rollout",
    "forecast",
]

__getattr__ = _on_demand(
    __name__,
    {
        **dict.fromkeys(("Model", "Rollout", "forecast"), "job"),
        **dict.fromkeys(
            ("Forecast", "HandleForecast", "Layout", "Link", "PhaseForecast"), "description"
        ),
    },
)
