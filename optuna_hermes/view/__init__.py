"""Output for people: progress, status, summary; imports neither Optuna nor torch."""
