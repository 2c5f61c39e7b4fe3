"""Memories: what lies between acting and learning."""
