"""Objects that all ranks of a machine have alike: one host copy for all of them."""
