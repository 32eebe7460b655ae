"""Small buckets for streamed steps."""

from __future__ import annotations

from placement.registration import streamed_optimizer


def set_bucket_bytes(nbytes: int) -> None:
    """Let the steps of optimizers that are registered from now on stream buckets of this size. A
    fixture of `tests/support/around_tests.py` sets the size back before the next test."""
    streamed_optimizer.BUCKET_BYTES = nbytes
