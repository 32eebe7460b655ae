"""Forecasts: which handles fit on the device in each phase of a job, and the cost of its moves,
before the job runs. See docs/planning.md."""

from __future__ import annotations

from typing import TYPE_CHECKING

from placement.core import on_demand as _on_demand

if TYPE_CHECKING:
    from placement.forecasting.description import Forecast, HandleForecast, Link, PhaseForecast
    from placement.forecasting.job import forecast
    from placement.forecasting.run import Run
    from placement.forecasting.stand_ins import Rollout

__all__ = ["Forecast", "HandleForecast", "Link", "PhaseForecast", "Rollout", "Run", "forecast"]

__getattr__ = _on_demand(
    __name__,
    {
        **dict.fromkeys(("Forecast", "HandleForecast", "Link", "PhaseForecast"), "description"),
        "Rollout": "stand_ins",
        "Run": "run",
        "forecast": "job",
    },
)
