"""The ground layer: states, the state machine, the journal, snapshots, errors and settings. It imports no other folder of placement."""
