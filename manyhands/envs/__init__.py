"""Simulators, all behind EnvGroup: a batch of them, stepped asynchronously with send and recv."""
