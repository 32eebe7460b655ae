"""The integration's logger. verl sets the root logger to WARNING, so this one has a level of its own, set as verl's own are."""

from __future__ import annotations

import logging
import os

logger = logging.getLogger("placement.integrations.verl")
logger.setLevel(os.environ.get("VERL_LOGGING_LEVEL", "INFO"))
