"""The drill itself, without a broker."""
