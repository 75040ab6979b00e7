"""The project's own measurements. They print and never judge: a ratio stands beside a peer and the limit of the same run."""
