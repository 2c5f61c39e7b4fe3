"""Pure functions of tensors, each tested against numbers computed by hand."""
