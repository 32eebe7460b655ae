"""Publish weights to a rollout engine: under the names that it knows, in buckets of bounded size."""
