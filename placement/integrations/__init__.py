"""Training frameworks that placement works with by configuration alone."""
