"""The algorithms: frozen dataclasses whose fields are the recipe's settings and whose methods are plain maths."""
