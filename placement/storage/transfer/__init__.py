"""Move bytes between a device and the host: both directions at once, in chunks, verified."""
