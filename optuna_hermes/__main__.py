"""``python -m optuna_hermes``, the same as ``optuna-hermes``."""

from optuna_hermes.cli import main

if __name__ == "__main__":
    main()
