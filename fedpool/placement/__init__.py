"""Which devices a request gets. Policies over the pool index and the fabric come with their own part of the project."""
