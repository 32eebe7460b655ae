"""Imported before much else, most of which stays: nobody looks for garbage until `warm` is done."""

import gc

gc.disable()
