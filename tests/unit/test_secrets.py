"""Passwords of database URLs in everything that is shown."""

from __future__ import annotations

import pytest

from optuna_hermes.ledger import with_password
from optuna_hermes.ledger._secrets import redacted, without_password


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("sqlite:///study.db", "sqlite:///study.db"),
        ("study.db", "study.db"),
        ("postgresql://ann@host/study", "postgresql://ann@host/study"),
        ("postgresql://ann:pw@host:5432/study", "postgresql://ann:***@host:5432/study"),
        ("mysql+pymysql://ann:p%40w@host/study", "mysql+pymysql://ann:***@host/study"),
        ("postgresql://ann:p/w@x@host/study", "postgresql://ann:***@host/study"),
        ("redis://:pw@host:6379/0", "redis://:***@host:6379/0"),
        ("postgresql://host/s?user=a&password=p%20w", "postgresql://host/s?user=a&password=***"),
        ("postgresql://host/s?sslpassword=x&a=b@c", "postgresql://host/s?sslpassword=***&a=b@c"),
        ("postgresql://ann:pw@host/s?passwd=q", "postgresql://ann:***@host/s?passwd=***"),
        ("postgresql://host/s?password=&user=a", "postgresql://host/s?password=&user=a"),
        ("--storage=postgresql://ann:pw@host/s", "--storage=postgresql://ann:***@host/s"),
    ],
)
def test_a_url_is_shown_without_its_passwords(url: str, expected: str) -> None:
    """Before the host and among the options; all else stays."""
    assert without_password(url) == expected


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("postgresql+psycopg://ann@host/s", "postgresql+psycopg://ann:p%40w@host/s"),
        ("postgresql+psycopg://ann:own@host/s", "postgresql+psycopg://ann:own@host/s"),
        ("postgresql+psycopg://host/s?user=a", "postgresql+psycopg://host/s?password=p%40w&user=a"),
        ("postgresql+psycopg:///s", "postgresql+psycopg:///s?password=p%40w"),
        ("sqlite:///s.db", "sqlite:///s.db"),
    ],
)
def test_other_processes_get_the_password_of_this_one(
    url: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the user is an option, or that of the system."""
    monkeypatch.setenv("PGPASSWORD", "p@w")
    assert with_password(url) == expected


def test_no_spelling_of_a_password_is_left_in_a_text() -> None:
    """Drivers tell it decoded, users type it encoded, in more than one way."""
    url = "postgresql://ann:a%20b%2Fc@host/s?sslpassword=x+y"
    text = "a%20b%2Fc, a b/c, a+b%2Fc, a%20b/c; x+y, x y, x%20y, x%2By"
    assert redacted(text, url) == "***, ***, ***, ***; ***, ***, ***, ***"
    assert redacted("nothing to hide", "sqlite:///nothing.db") == "nothing to hide"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("port 1 failed, p", "port 1 failed, p"),
        ("postgresql://ann:p@host:5432/s", "postgresql://ann:***@host:5432/s"),
        ("dsn 'password=p host=h port=1'", "dsn 'password=*** host=h port=1'"),
        ("connect(password='p', port=1)", "connect(password='***', port=1)"),
    ],
)
def test_a_password_of_a_letter_is_hidden_where_it_is_one(text: str, expected: str) -> None:
    """Any letter of a message might be meant."""
    assert redacted(text, "postgresql://ann:p@host/s") == expected
