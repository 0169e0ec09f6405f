"""Values of users' own as trees of plain values and tensors, and their fingerprints."""
