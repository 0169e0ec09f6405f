"""The devices of this host, and what their driver says of them."""
