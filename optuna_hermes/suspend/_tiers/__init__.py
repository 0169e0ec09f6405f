"""The tiers where a suspended trial's state waits, and its checkpoints."""
