"""What was done, so that it can be proved: canonical entries in a Merkle log, checkpoints that its owner and its witnesses sign."""
