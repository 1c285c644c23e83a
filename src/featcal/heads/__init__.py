"""The last layer of a network: where it is, what it takes and gives, and how it is replaced."""
