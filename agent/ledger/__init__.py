"""Sites' ledgers: hashed and signed, witnessed by other sites, forgotten in time."""
