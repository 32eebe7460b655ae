"""How far hypothesis goes. Every run draws the same cases, so that a test that passes goes on
passing. `SWEEP=all` and `HYPOTHESIS_PROFILE=nightly` draw others each time; what they find becomes
an `@example`."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

settings.register_profile(
    "ci",
    derandomize=os.environ.get("SWEEP") != "all",
    max_examples=100 if os.environ.get("SWEEP") == "all" else 50,
    stateful_step_count=30,
    deadline=None,
    print_blob=True,
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.filter_too_much,
    ],
)
settings.register_profile(
    "nightly",
    settings.get_profile("ci"),
    derandomize=False,
    max_examples=5000,
    stateful_step_count=60,
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
