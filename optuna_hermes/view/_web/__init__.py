"""``optuna-hermes web``: a study in the browser, live."""
