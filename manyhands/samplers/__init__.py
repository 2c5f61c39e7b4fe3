"""Samplers: env groups and a policy in, rollouts out."""
