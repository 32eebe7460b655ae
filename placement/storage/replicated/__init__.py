"""Replicated storages: objects of which all ranks of one machine have the same bytes share one host copy."""
