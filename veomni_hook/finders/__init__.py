"""The import hook: finder (decides), loader (executes), handle (undoes), children (spawned processes)."""
