"""Broker process, which carries out what the core decides."""
