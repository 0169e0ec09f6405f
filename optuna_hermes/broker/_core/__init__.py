"""Core of the broker: an event in, commands out. No clock, no I/O."""
