"""Everything that relies on Lightning's private attributes; each is pinned by a test."""
