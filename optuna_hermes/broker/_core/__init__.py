"""What a broker knows and decides: an event in, commands out. No clock, no I/O."""
