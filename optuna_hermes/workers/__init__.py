"""``optimize`` and the processes it starts; empty, so that each process imports only its part."""
