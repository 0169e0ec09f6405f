"""Devices of this host, and the state that their driver reports."""
