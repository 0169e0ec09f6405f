"""Output for people: progress, status, summary, charts; imports neither Optuna nor torch."""
