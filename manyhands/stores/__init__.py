"""Stores: where parameters and optimiser state live, and the rules that update them."""
