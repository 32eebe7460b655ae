"""The ground that everything stands on: states, the state machine, the journal, snapshots, errors, settings. Imports nothing above it."""
