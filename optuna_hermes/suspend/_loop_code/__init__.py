"""What the code of a user's loop refers to: variables, iterators, generators."""
