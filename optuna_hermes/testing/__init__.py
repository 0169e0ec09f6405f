"""Test support for packages of your own: a suite for policies, and sessions without a broker."""

from optuna_hermes.testing.policy import PolicyContract as PolicyContract
from optuna_hermes.testing.session import FakeSession as FakeSession
from optuna_hermes.testing.session import RankedSession as RankedSession
