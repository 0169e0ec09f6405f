"""The processes that ask a broker for time on its devices."""
