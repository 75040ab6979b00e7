"""What a person touches: the command line, and with its own part the terminal."""
