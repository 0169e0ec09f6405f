"""Whole clusters: job traces and energy, and the policies that were made for them.

The core does not import this room; ``optuna_hermes.policies`` finds its policies by name.

- ``qssf``, ``ones``, ``smd``, ``energy``: the policies, and what they are made of.
- ``job_replay``: jobs of a trace under a policy, simulated by ``job_simulator``.
- ``job_files``: the reader of traces.
"""
