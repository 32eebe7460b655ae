"""Storages: where the bytes of a registered object are, on the device and on the host."""
