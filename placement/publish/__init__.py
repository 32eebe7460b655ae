"""Publishing weights: by the names that a rollout engine knows, in bounded buckets."""
