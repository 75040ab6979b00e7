"""Reading sites' ledgers: asked for through the hub or in files, verified, proved, exported, reported."""
