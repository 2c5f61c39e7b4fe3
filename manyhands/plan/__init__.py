"""What a recipe would do on machines that one does not have: measured here, computed for there.

measure.py takes times on this machine, model.py has them and the formula, events.py and simulation.py play the topology through,
show.py tells and draws it.
"""
