"""Hosts: how a component is started and called – inline, in a process of its own, on a cluster."""
