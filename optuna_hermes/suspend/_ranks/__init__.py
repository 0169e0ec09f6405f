"""Trials that train in several processes."""
