"""The moves of a phase transition: which handle goes where, in which order, and back after an error."""
