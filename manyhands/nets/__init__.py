"""Networks: torsos by name, heads, and the flat vector that all of a model's parameters are views of."""
