"""``optuna-hermes top``: a study in the terminal, live."""
