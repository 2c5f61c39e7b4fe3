"""Everything that knows Ray. Imported only when a recipe asks for it."""
