"""Questions that the papers ask, each with one command: `manyhands study NAME [--quick]`.

A study is a function that returns what is to be drawn: series of points, or bars. catalogue.py has them all by name; curves.py
trains variants of recipes, rates.py measures how fast they are, gradients.py looks at what an update is made of.
"""
