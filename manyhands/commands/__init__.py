"""What `manyhands COMMAND` does: a function of the words after it, which returns the exit code."""
