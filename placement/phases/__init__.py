"""Phases: the stack of open phases, phase transitions from plan to moved bytes, and the checks on
the way (turns, writes, audits)."""
