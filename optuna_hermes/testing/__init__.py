"""What others test their own parts with: a suite for each contract, and stand-ins."""

from optuna_hermes.testing._broker import FakeBroker as FakeBroker
from optuna_hermes.testing._devices import FakeDevices as FakeDevices
from optuna_hermes.testing._ledger import LedgerContract as LedgerContract
from optuna_hermes.testing._policy import PolicyContract as PolicyContract
from optuna_hermes.testing._session import FakeSession as FakeSession
