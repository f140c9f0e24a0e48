"""Rules that fuse ops for backends that claim them."""
