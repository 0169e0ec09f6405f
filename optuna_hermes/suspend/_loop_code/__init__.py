"""Variables, iterators and generators that the code of a user's loop refers to."""
