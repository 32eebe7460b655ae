"""Phases: the stack of open ones, one transition from plan to bytes, and all that is looked at on the way."""
