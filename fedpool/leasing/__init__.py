"""Leases: `lease` is the life of one as a table, `grants` the site that gives and takes, `gang` the hub that joins sites."""
