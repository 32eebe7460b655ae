"""Where bytes live and how they move: the device seam, host slabs, ranges, the mover."""
