"""The broker as a process: what its core decides is carried out here."""
