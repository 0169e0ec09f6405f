"""Test support that several test modules share: stand-ins, databases, and a broker's world."""
